"""Settings of a client that cannot be, and those that were not given."""

from typing import Any

import pytest

from shoal.client.model.auto import AutoDistributedModelForCausalLM
from shoal.client.settings.pretrained_arguments import make_client_config
from shoal.protocol.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("connect_timeout_seconds", "5", "above 0"),
        ("connect_timeout_seconds", 0, "above 0"),
        ("failover_timeout_seconds", -1, "at least 0"),
        ("failover_timeout_seconds", float("nan"), "at least 0"),
        ("refresh_seconds", "x", "at least 0"),
        ("refresh_seconds", True, "at least 0"),
        ("max_step_bytes", 0, "at least 1"),
        ("max_step_bytes", 1.5, "whole number"),
        ("seed", "a", "whole number"),
        ("weights", "fp8", "int8, bf16, fp32"),
        ("wire_dtype", "int4", "auto, fp32, fp16, bf16, int8"),
        ("delivery", "ring", "chain, star"),
        ("kv_format", "int4", "float, int8"),
        ("wire_dtype", ["fp32"], "auto, fp32, fp16, bf16, int8"),
    ],
)
def test_setting_that_cannot_be_is_named_before_anything_is_opened(
    name: str, value: Any, choices: str
) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be .*{choices}"):
        AutoDistributedModelForCausalLM.from_pretrained("no/such/model", **{name: value})


def test_none_is_no_code_and_no_address() -> None:
    for given in ({"join": None}, {}):
        assert make_client_config(None, given) == make_client_config((), {})
    assert make_client_config("/ip4/…", {"join": None}).initial_peers == ("/ip4/…",)
