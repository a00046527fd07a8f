"""Running the service: the main process with an engine process and front ends as its children, and a clean stop."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq.auth

from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ServeConfig, split_names
from archerfish.errors import InvalidOptionError, MachineError
from archerfish.kernels.select import choose_device
from archerfish.serve import processes
from archerfish.serve.calls import curl, examples
from archerfish.serve.logs import set_up_log
from archerfish.serve.model_tables import ModelConfig
from archerfish.serve.processes import FrontConfig, HostConfig, KeptProcess, ModelSpec, front_process
from archerfish.serve.replicas import RollingRestart, replica_processes
from archerfish.serve.tenants import Tenants
from archerfish.serve.tracing import needs_tracing
from archerfish.serve.wire import names_of
from archerfish.store.names import STORY_MODEL
from archerfish.types import Progress, no_progress

logger = logging.getLogger("archerfish.serve")
STORY_BLOCK, STORY_TOKENS = 64, 32_768  # the states of so many tokens take 200 MB
UNREAD_S = 60  # a client that reads nothing of its answer for so long is disconnected


def serve(
    serve: ServeConfig | None = None,
    engine: EngineConfig | None = None,
    embed: EmbedConfig | None = None,
    hub: HubConfig | None = None,
    progress: Progress = no_progress,
    *,
    models: Sequence[ModelConfig] = (),
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. models: see `models_of`. announce: gets the texts for the user instead of
    print."""
    config = serve or ServeConfig()
    hub = hub or HubConfig()
    announce = announce or partial(print, flush=True)
    specs = models_of(config, engine or EngineConfig(), embed or EmbedConfig(), models)
    if config.log_format == "json":
        set_up_log("main", config.log_format, config.log_level)
    Tenants.from_file(config.api_keys_file)  # errors in the configuration should show before the models are loaded
    needs_tracing(config.otlp_endpoint)
    front_ends: list[KeptProcess] = []
    engines: list[KeptProcess] = []

    def kill() -> None:
        processes.kill_all(front_ends)
        processes.kill_all(engines)
        shutil.rmtree(directory, ignore_errors=True)

    with (
        processes.stop_on_signals(kill),
        tempfile.TemporaryDirectory(prefix="archerfish-", ignore_cleanup_errors=True) as directory,
        bind(config) as listener,
    ):
        # The directory has mode 0700: no other user can connect to the socket in it.
        host = host_config(config, specs, hub, directory)
        kinds = fetch_models(specs, hub, progress)
        engines += replica_processes(host, config.replicas)

        def front_config() -> FrontConfig:
            return FrontConfig(
                addresses=tuple(engine.wait()["address"] for engine in engines),
                credentials=host.front_end_pass,
                routing_secret=host.routing_secret,
                serve=dataclasses.asdict(config),
                listener=listener.fileno(),
                retry_after_s=max(1.0, *(engine.start_s for engine in engines)),
            )

        wait_s = config.drain_s + config.grace_s
        front_ends += [
            front_process(front_config, listener.fileno(), grace_s=wait_s) for _ in range(config.num_front_ends)
        ]
        try:
            for child in (*engines, *front_ends):
                child.start()
            for child in (*engines, *front_ends):
                child.wait()
            announce(ready_text(url_of(listener), specs, config, kinds))
            with RollingRestart(engines).on_signal():
                wait_for_signal()
            with contextlib.suppress(OSError):  # the reader of the output may be gone
                announce(stopping_text(config))
        finally:
            listener.close()
            processes.stop_all(front_ends)
            processes.stop_all(engines)


def stopping_text(config: ServeConfig) -> str:
    drain = (
        f"requests are taken for {config.drain_s:g} s more while /ready answers 503; then " if config.drain_s else ""
    )
    end = f"running requests have {config.grace_s:g} s to finish, new ones are refused"
    return f"Stopping: {drain}{end}. Ctrl+C ends it at once."


def wait_for_signal() -> None:
    """Return when a signal asks the service to stop."""
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        threading.Event().wait()


def host_config(config: ServeConfig, models: tuple[ModelSpec, ...], hub: HubConfig, directory: str) -> HostConfig:
    """directory: for what the processes of the service share."""
    secret_key = read_secret_key(config.zmq_key_file)
    if config.zmq_address.endswith((":*", ":0")):
        raise InvalidOptionError(
            "[serve] zmq_address needs a port, which stays the same when the engine process is restarted."
        )
    if secret_key and not config.zmq_address.startswith("tcp:"):
        raise InvalidOptionError("[serve] zmq_key_file is given, but zmq_address is no tcp:// address.")
    for origin in split_names(config.cors_origins):
        if origin != "*" and "://" not in origin:
            message = f"[serve] cors_origins: {origin!r} is no origin of web pages."
            raise InvalidOptionError(message, hint="Write it with its scheme: https://chat.example.")
    if not config.api_keys_file and not processes.is_loopback(config.host):
        logger.warning("Anyone who reaches this address may use it: there are no API keys ([serve] api_keys_file).")
    if config.allow_lora_updates and not any(spec.options.get("lora_dir") for spec in models):
        message = "[serve] allow_lora_updates is given, but no directory from which adapters may be loaded."
        raise InvalidOptionError(message, hint="Name one: lora_dir (--lora-dir).")
    if config.replicas > 1 and config.zmq_address:
        raise InvalidOptionError("[serve] zmq_address cannot be served by several replicas.", hint="Set replicas to 1.")
    return HostConfig(
        address=f"ipc://{directory}/engine",
        adapters_file=f"{directory}/adapters.json",
        open_address=config.zmq_address,
        models=models,
        hub=dataclasses.asdict(hub),
        front_end_pass=secrets.token_urlsafe(32),
        secret_key=secret_key,
        routing_secret=secrets.token_urlsafe(32) if config.replicas > 1 else "",
        client_keys=split_names(config.zmq_client_keys),
        max_queue_texts=config.max_queue_texts,
        latency_budget_ms=config.latency_budget_ms,
        max_gap_ms=config.max_gap_ms,
        api_keys_file=config.api_keys_file,
        admission={name: getattr(config, name) for name in ("max_wait_s", "max_prompt_tokens", "max_output_tokens")},
        memory_gib=config.memory_gib,
        hang_s=config.hang_s,
        grace_s=config.grace_s,
        log_format=config.log_format,
    )


def read_secret_key(path: str) -> str:
    """The secret CURVE key of a file as `zmq.auth.create_certificates` writes it."""
    if not path:
        return ""
    try:
        _, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise InvalidOptionError(f"[serve] zmq_key_file {path} cannot be read: {error}.") from error
    if secret is None:
        hint = "Name the file that ends in .key_secret."
        raise InvalidOptionError(f"[serve] zmq_key_file {path} has no secret key.", hint=hint)
    return secret.decode()


def bind(config: ServeConfig) -> socket.socket:
    """A socket that listens as configured."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise MachineError(f"[serve] host {config.host!r} is no address of this machine: {error}.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        hint = "Give an address of this machine." if is_elsewhere else "Choose another port; 0 takes any free one."
        raise MachineError(f"Cannot listen on {config.host}:{config.port}: {error.strerror}.", hint=hint) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def models_of(
    config: ServeConfig, engine: EngineConfig, embed: EmbedConfig, models: Sequence[ModelConfig] = ()
) -> tuple[ModelSpec, ...]:
    """The models to serve: those of [engine] and [embed], a cross-encoder, and `models`.

    If `models` has a model of a kind, the default model of that kind is left out.
    """
    found: list[ModelSpec] = []

    def add(kind: Any, options: EngineConfig | EmbedConfig, loads: Any = config.loads) -> None:
        found.append(ModelSpec(kind=kind, options=dataclasses.asdict(options), aliases=(options.model,), loads=loads))

    listed = {model.kind for model in models}
    has_own_llm = config.kinds in ("all", "generation") and not (
        "generation" in listed and engine.model == EngineConfig.model
    )
    has_own_encoder = config.kinds in ("all", "embedding") and not (
        "embedding" in listed and embed.model == EmbedConfig.model
    )
    if config.api_keys_file and engine.scheduling_policy == EngineConfig.scheduling_policy:
        engine = engine.replace(scheduling_policy="fair-share")  # tenants share the engine
    if has_own_llm:
        add("generation", engine)
    if has_own_encoder:
        add("embedding", embed)
    if config.rerank_model:
        add("cross-encoder", embed.replace(model=config.rerank_model))
    others = (
        engine.replace(speculation="off", draft_model="") if engine.draft_model else engine
    )  # of another vocabulary
    for model in models:
        if others is not engine and model.kind == "generation":
            logger.info("%s is served without speculation: the draft model is that of %s.", model.model, engine.model)
        base: EngineConfig | EmbedConfig = others if model.kind == "generation" else embed
        add(model.kind, base.replace(**{**model.options, "model": model.model}), model.loads or config.loads)
    if has_own_llm and engine.model == EngineConfig.model:
        add("generation", story_config(others), "demand")
    names = split_names(config.served_model_name)
    taken = {name for spec in found for name in names_of(spec.model, names)}
    for name in engine.lora_paths:
        if name in taken:
            hint = "Give the adapter another name."
            raise InvalidOptionError(f"[engine] lora_modules: {name!r} is the name of a model.", hint=hint)
    return (msgspec.structs.replace(found[0], served_names=names), *found[1:]) if found else ()


def story_config(engine: EngineConfig) -> EngineConfig:
    """The small model that archerfish contains. It is served in addition to the default model."""
    return engine.replace(
        model=STORY_MODEL,
        load_format="auto",
        max_model_len=STORY_TOKENS,
        block_size=STORY_BLOCK,
        max_cache_tokens=STORY_TOKENS,
        memory_budget_gib=0.0,
        kv_dtype="auto",
        enable_lora=False,
        lora_modules="",
        lora_dir="",
    )


def fetch_models(models: tuple[ModelSpec, ...], hub: HubConfig, progress: Progress) -> set[str]:
    """Download and convert missing models here, where the user sees the progress; return the kinds of all models."""
    from archerfish.engine.inference_core import locate
    from archerfish.engine.llm_loading import read_facts
    from archerfish.serve.hosted_llm import is_tts

    kinds: set[str] = set()
    for spec in models:
        if spec.kind == "generation":
            facts = read_facts(EngineConfig(**spec.options), hub, progress)
            kinds.add("tts" if is_tts(facts) else spec.kind)
        else:
            locate(EmbedConfig(**spec.options), hub, progress)
            kinds.add(spec.kind)
    return kinds


def ready_text(url: str, models: tuple[ModelSpec, ...], config: ServeConfig, kinds: set[str]) -> str:
    """The text for the user when the service is ready. kinds: as GET /v1/models shows them."""
    names = [(*spec.served_names, spec.model)[0] for spec in models]
    shown = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    devices = dict.fromkeys(str(choose_device(spec.options.get("device", "auto"))) for spec in models)
    lines = [f"archerfish serves {shown} at {url} (Ctrl+C stops it)", f"Computing on {' and '.join(devices)}.", ""]
    if config.replicas > 1:
        lines[1] = f"{lines[1][:-1]}, by {config.replicas} replicas."
    if config.zmq_address:
        lines.insert(1, f"ZMQ clients connect to {config.zmq_address}.")
    first = examples(kinds)[0]
    return "\n".join([*lines, curl(url, *first, has_keys=bool(config.api_keys_file)), ""])
