"""The configuration with which one joins a model's swarm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

from transformers import PreTrainedConfig

from ...models.checkpoints.checkpoint import Checkpoint
from ...models.checkpoints.hub import DEFAULT_HUB, Hub
from ...protocol.errors import UsageError
from ...protocol.ids import ModelId
from ..settings.client_config import ClientConfig
from ..settings.pretrained_arguments import (
    PETALS_SETTINGS,
    check_known,
    is_client_setting,
    make_client_config,
    make_initial_peers,
)
from .local_layers import open_checkpoint, override

Join = Callable[[ModelId, PreTrainedConfig, ClientConfig], Any]
"""Joins the swarm of a model and returns a `SwarmClient`; raises what `Client.join` does."""


_OWN = ("_model_id", "_join", "model", "client", "initial_peers", "hub")
_SETTINGS = {field.name for field in fields(ClientConfig)} - {"initial_peers", "join"}


class DistributedConfig:
    """The configuration of transformers, extended by the settings to join a swarm.

    `model` is that configuration, `client` the settings of a client that joins, and `hub` is where
    more files come from. Creating one joins nothing.
    """

    def __init__(
        self, model: PreTrainedConfig, client: ClientConfig, join: Join, hub: Hub = DEFAULT_HUB
    ) -> None:
        self._model_id: ModelId = model.dht_prefix
        self._join = join
        self.model = model
        self.client = client
        self.hub = hub

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not there yet, while this object is made or copied
            raise AttributeError(name)
        is_setting = name in _SETTINGS
        return getattr(self.client if is_setting else self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change a setting of the model, or of clients that join from now on.

        Settings of PETALS act under the names that they have here, or warn that they do not.
        """
        if name in _OWN:
            super().__setattr__(name, value)
        elif name in _SETTINGS or name in PETALS_SETTINGS:
            self._set_client(name, value)
        else:
            setattr(self.model, name, value)

    def _set_client(self, name: str, value: object) -> None:
        settings: dict[str, Any] = {**vars(self.client), name: value}
        self.client = make_client_config(settings.pop("initial_peers"), settings)

    @classmethod
    def open(
        cls,
        model: str | Path,
        join: Join,
        initial_peers: object,
        revision: str | None,
        options: Mapping[str, Any],
    ) -> tuple[Checkpoint, Self]:
        """Open a model directory or Hub id, with the arguments that from_pretrained() was given.

        Those are `token` and `cache_dir` for the Hub, settings of a client, and changes of the
        model's configuration. What is None is not given. Raises UsageError for unknown names.
        """
        given = {name: value for name, value in options.items() if value is not None}
        token = given.pop("token", given.pop("use_auth_token", None))
        hub = Hub(token, given.pop("cache_dir", None))
        settings = {name: given.pop(name) for name in list(given) if is_client_setting(name)}
        client = make_client_config(initial_peers, settings)  # before anything is opened
        checkpoint, model_config = open_checkpoint(model, revision, hub)
        check_known(name for name in given if not hasattr(model_config, name))
        override(model_config, given)
        return checkpoint, cls(model_config, client, join, hub)

    @property
    def dht_prefix(self) -> ModelId:
        """The model id in the directory: a digest of configuration and weights."""
        return self._model_id

    @property
    def initial_peers(self) -> tuple[str, ...]:
        """Addresses of peers to join through."""
        return self.client.initial_peers

    @initial_peers.setter
    def initial_peers(self, addresses: Sequence[str] | str) -> None:
        self._set_client("initial_peers", addresses)

    def join(self, dht: Any = None) -> Any:
        """Join the swarm and return a `SwarmClient`, which the caller closes.

        Where the settings name nobody to join through, it is those that a `hivemind.DHT` began
        with.
        """
        client = self.client
        if dht is not None and not client.initial_peers and not client.join:
            addresses = make_initial_peers(getattr(dht, "initial_peers", None) or ())
            client = replace(client, initial_peers=addresses)
        return self._join(self._model_id, self.model, client)


_ORIGINS: WeakValueDictionary[int, DistributedConfig] = WeakValueDictionary()
"""How open models have joined, by the id of their configuration."""


def note_origin(origin: DistributedConfig) -> None:
    """Let `RemoteSequential(model.config)` join as the model did, as long as `origin` is kept."""
    _ORIGINS[id(origin.model)] = origin


def find_origin(given: object) -> DistributedConfig:
    """Return the configuration with which to join; UsageError if there is none."""
    if isinstance(given, DistributedConfig):
        return given
    origin = _ORIGINS.get(id(given))
    if origin is not None and origin.model is given:
        return origin
    raise UsageError(
        "config must be the result of AutoDistributedConfig.from_pretrained(model, "
        "initial_peers=...), or the config of an open model, not "
        f"{type(given).__name__ if isinstance(given, PreTrainedConfig) else repr(given):.60}"
    )
