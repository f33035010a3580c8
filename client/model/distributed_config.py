"""The configuration of a model, together with the settings to join its swarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ...models.checkpoints.checkpoint import Checkpoint
from ...protocol.ids import ModelId, make_model_id
from ...protocol.net.clock import SystemClock
from ..runtime.client import Client
from ..runtime.joining import Connect, SwarmModel, connect_over_network
from ..settings.config import ClientConfig, make_client_config
from .local_layers import load_config


def open_checkpoint(model: str | Path, revision: str | None) -> tuple[Checkpoint, PreTrainedConfig]:
    """Open a model directory or Hub id; raises ModelError when it cannot be used."""
    checkpoint = Checkpoint.open(model, revision)
    config = load_config(checkpoint)
    config.name_or_path = str(model)
    return checkpoint, config


def join_swarm(
    checkpoint: Checkpoint, model: PreTrainedConfig, config: ClientConfig, connect: Connect
) -> Client:
    """Join the swarm of exactly these weights; raises what Client.join() does."""
    model_id = make_model_id(checkpoint.config, checkpoint.revision)
    known = SwarmModel(model_id, model.num_hidden_layers, model.hidden_size)
    return Client.join(config, connect, SystemClock(), known)


_OWN = ("_checkpoint", "_connect", "model", "client", "initial_peers")
_SETTINGS = {field.name for field in fields(ClientConfig)} - {"initial_peers", "join"}


class DistributedConfig:
    """What AutoDistributedConfig returns: the attributes of transformers' configuration, and more.

    `model` is that configuration, `client` the settings of a client that joins. Creating one joins
    nothing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: PreTrainedConfig,
        client: ClientConfig,
        connect: Connect,
    ) -> None:
        self._checkpoint = checkpoint
        self._connect = connect
        self.model = model
        self.client = client

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not there yet, while this object is made or copied
            raise AttributeError(name)
        is_setting = name in _SETTINGS
        return getattr(self.client if is_setting else self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change a setting of the client, for those who join from now on, or the model's."""
        if name in _SETTINGS:
            self._set_client(name, value)
        elif name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def _set_client(self, name: str, value: object) -> None:
        settings: dict[str, Any] = {**vars(self.client), name: value}
        self.client = make_client_config(settings.pop("initial_peers"), settings)

    @property
    def dht_prefix(self) -> ModelId:
        """The model id in the directory: a digest of configuration and weights."""
        return make_model_id(self._checkpoint.config, self._checkpoint.revision)

    @property
    def initial_peers(self) -> tuple[str, ...]:
        """Addresses of peers to join through."""
        return self.client.initial_peers

    @initial_peers.setter
    def initial_peers(self, addresses: Sequence[str] | str) -> None:
        self._set_client("initial_peers", addresses)

    def join(self) -> Client:
        """Join the swarm; the caller closes the client."""
        return join_swarm(self._checkpoint, self.model, self.client, self._connect)


class AutoDistributedConfig:
    """Opens configurations; never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str | Path,
        *,
        initial_peers: Sequence[str] | str = (),
        revision: str | None = None,
        connect: Connect = connect_over_network,
        **client_config: Any,
    ) -> DistributedConfig:
        """Read the configuration of a model directory or Hub id, for RemoteSequential.

        Arguments and errors are those of DistributedModel.from_pretrained().
        """
        client = make_client_config(initial_peers, client_config)
        return DistributedConfig(*open_checkpoint(model, revision), client, connect)
