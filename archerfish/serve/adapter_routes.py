"""Routes that load and unload LoRA adapters, as vLLM has them."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.types import ASGIApp

from archerfish.config import ServeConfig
from archerfish.errors import CallerError, InvalidInputError
from archerfish.serve.answers import AdapterChanged
from archerfish.serve.bodies import UNUSED, Body
from archerfish.serve.catalog import MISFIT, Catalog
from archerfish.serve.client import RemoteError
from archerfish.serve.errors import json_response
from archerfish.serve.http import BodyRoute
from archerfish.serve.wire import ChangeAdapter


class UpdatesDisabledError(CallerError):
    """This server's adapters are those of its start."""

    status, code = 403, "lora_updates_disabled"
    default_hint = "Start the server with --allow-lora-updates."


class UnloadBody(Body):
    """POST /v1/unload_lora_adapter."""

    model: str | None = Field(None, description="The model that has the adapter; without it the first that it fits.")
    lora_name: str
    lora_int_id: int | None = Field(None, description=UNUSED)


class LoadBody(UnloadBody):
    """POST /v1/load_lora_adapter."""

    lora_path: str = Field(description="Of a directory that PEFT saved, within lora_dir.")
    load_inplace: bool = Field(False, description="In place of the adapter of this name.")


class AdapterRoutes:
    """Every replica makes the change before the answer comes."""

    def __init__(self, catalog: Catalog, config: ServeConfig) -> None:
        self.catalog, self.is_allowed = catalog, config.allow_lora_updates
        self.routes = [
            BodyRoute("/v1/load_lora_adapter", self.load, LoadBody, AdapterChanged),
            BodyRoute("/v1/unload_lora_adapter", self.unload, UnloadBody, AdapterChanged),
        ]

    async def load(self, request: Request, body: LoadBody) -> ASGIApp:
        """Load a LoRA adapter, which requests may then name as their model."""
        values = await self._change(body, action="load", path=body.lora_path, in_place=body.load_inplace)
        found = {"root": values["path"], "rank": values["rank"]}
        return json_response(AdapterChanged(status="loaded", lora_name=body.lora_name, **found))

    async def unload(self, request: Request, body: UnloadBody) -> ASGIApp:
        """Unload a LoRA adapter; requests that run with it go on."""
        await self._change(body, action="unload")
        return json_response(AdapterChanged(status="unloaded", lora_name=body.lora_name))

    async def _change(self, body: UnloadBody, **change: Any) -> dict[str, Any]:
        if not self.is_allowed:
            raise UpdatesDisabledError("This server does not change its adapters while it runs.")
        card, cards = await self.catalog.find(body.model, "generation"), await self.catalog.cards()
        owner = next((card for card in cards for one in card.adapters or () if one.name == body.lora_name), None)
        if change["action"] == "load" and await self.catalog.is_model(body.lora_name):
            raise InvalidInputError(f"{body.lora_name!r} is the name of a model.", hint="Choose another lora_name.")
        models = [card.parent or card.id]
        if body.model is None:  # the one that has it, else the first that it fits
            takers = [one.id for one in cards if one.adapters is not None and one.kind == "generation"]
            models = [owner.id] if owner is not None else takers or models
        elif change["action"] == "load" and owner is not None and owner.id != models[0]:
            hint = "Unload it first, or choose another lora_name."
            raise InvalidInputError(f"{owner.id} has an adapter {body.lora_name!r}.", hint=hint)
        for model in models:
            try:
                values = await self.catalog.report(
                    ChangeAdapter(request_id="", model=model, name=body.lora_name, **change)
                )
            except RemoteError as error:
                if error.code != MISFIT or model == models[-1]:
                    raise
                continue
            break
        self.catalog.expire()
        return values
