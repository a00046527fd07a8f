"""Running the service: an engine process, front ends, and a clean stop."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

from archerfish.config import EmbedConfig, EngineConfig, HubConfig, ServeConfig
from archerfish.serve.front import GRACE_S, FrontConfig, bind, build_app, read_tenants, run_app
from archerfish.serve.front_ends import FrontEnds
from archerfish.serve.host_config import HostConfig, ModelSpec, is_loopback
from archerfish.serve.page import curl, examples
from archerfish.serve.signals import orderly_end
from archerfish.serve.supervisor import Supervisor
from archerfish.store.names import STORY_MODEL
from archerfish.types import Progress, no_progress

STOPPING = f"Stopping: what runs has {GRACE_S} s to finish, nothing new is taken. Ctrl+C ends it at once."
STORY_BLOCK, STORY_TOKENS = 64, 32_768  # the states of so many tokens take 200 MB, once they are written


def serve(
    serve: ServeConfig | None = None, engine: EngineConfig | None = None, embed: EmbedConfig | None = None,
    hub: HubConfig | None = None, progress: Progress = no_progress, *, announce: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `announce` gets the lines that say where, and that it stops; else they are printed."""
    config, hub = serve or ServeConfig(), hub or HubConfig()
    models = models_of(config, engine or EngineConfig(), embed or EmbedConfig())

    kinds: set[str] = set()

    def tell(url: str) -> None:
        (announce or say)(ready_text(url, models, config, kinds))

    read_tenants(config)  # before the models are loaded: a faulty file should show at once, and so should a taken port
    with orderly_end() as ending, bind(config) as listener:
        kinds |= fetch_models(models, hub, progress)
        credentials = secrets.token_urlsafe(32)
        host = HostConfig(
            models=models, hub=dataclasses.asdict(hub), front_end_pass=credentials, max_queue_texts=config.max_queue_texts,
            latency_budget_ms=config.latency_budget_ms, api_keys_file=config.api_keys_file,
            admission=admission_of(config, models), memory_gib=config.memory_gib, hang_s=config.hang_s,
        )
        supervisor = Supervisor(host)
        ending.kills.append(supervisor.kill)
        with supervisor:
            front = FrontConfig(
                address=supervisor.address, credentials=credentials, serve=dataclasses.asdict(config),
                retry_after_s=max(1.0, supervisor.start_s), listener=listener.fileno(),
            )
            others = FrontEnds(front, config.num_front_ends - 1)
            ending.kills.insert(0, others.kill)

            def stop() -> None:
                ending.is_begun = True
                others.stop()
                with contextlib.suppress(OSError):  # nobody may read it any more
                    (announce or say)(STOPPING)

            with others:
                run_app(build_app(front), listener, config, tell, stop, ending.force)


def models_of(config: ServeConfig, engine: EngineConfig, embed: EmbedConfig) -> tuple[ModelSpec, ...]:
    """The models to serve, as the engine process is told of them."""
    found: list[ModelSpec] = []
    loads: Any = config.loads
    if config.api_keys_file and engine.scheduling_policy == EngineConfig.scheduling_policy:
        engine = engine.replace(scheduling_policy="fair-share")  # between tenants
    if config.kinds in ("all", "generation"):
        found.append(ModelSpec(kind="generation", options=dataclasses.asdict(engine), aliases=(engine.model,), loads=loads))
    if config.kinds in ("all", "embedding"):
        found.append(ModelSpec(kind="embedding", options=dataclasses.asdict(embed), aliases=(embed.model,), loads=loads))
    if config.rerank_model:
        options = dataclasses.asdict(embed.replace(model=config.rerank_model))
        found.append(ModelSpec(kind="cross-encoder", options=options, aliases=(config.rerank_model,), loads=loads))
    if config.kinds in ("all", "generation") and engine.model == EngineConfig.model:
        found.append(story_spec(engine))
    return tuple(found)


def story_spec(engine: EngineConfig) -> ModelSpec:
    """The model that archerfish brings along, beside the one that is served unless a user names his own."""
    options = engine.replace(
        model=STORY_MODEL, load_format="auto", max_model_len=STORY_TOKENS, block_size=STORY_BLOCK,
        max_cache_tokens=STORY_TOKENS, memory_budget_gib=0.0,
    )  # fmt: skip
    return ModelSpec(
        kind="generation", options=dataclasses.asdict(options), aliases=(STORY_MODEL,), loads="demand", is_beside=True
    )


def admission_of(config: ServeConfig, models: tuple[ModelSpec, ...]) -> dict[str, Any]:
    """Limits of the gate in front of a model that writes."""
    writers = [spec.options for spec in models if spec.kind == "generation"]
    return {
        "max_wait_s": config.max_wait_s, "max_prompt_tokens": config.max_prompt_tokens,
        "max_output_tokens": config.max_output_tokens,
        "is_fair": all(options["scheduling_policy"] == "fair-share" for options in writers),
    }


def fetch_models(models: tuple[ModelSpec, ...], hub: HubConfig, progress: Progress) -> set[str]:
    """Download and convert what is not there yet, where somebody sees the progress; gives what kinds of models these are."""
    from archerfish.engine.arrow_engine import locate
    from archerfish.engine.llm_loading import read_facts
    from archerfish.serve.model_cards import is_tts

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
    """What a person sees when the service is ready. kinds: as GET /v1/models shows them."""
    names = [spec.model for spec in models]
    shown = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    lines = [f"archerfish serves {shown} at {url} (Ctrl+C stops it)", ""]
    if not config.api_keys_file and not is_loopback(config.host):
        lines.insert(1, "Anyone who reaches this address may use it: there are no API keys ([serve] api_keys_file).")
    first = examples(kinds)[0]
    return "\n".join([*lines, curl(url, *first, has_keys=bool(config.api_keys_file)), ""])


def say(text: str) -> None:
    print(text, flush=True)
