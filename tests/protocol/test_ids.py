"""Model ids: what changes them and what must not."""

import hashlib
import json

from shoal.protocol.ids import make_model_id

CONFIG = {"model_type": "llama", "hidden_size": 64, "rope": {"theta": 1e4, "type": "default"}}


def test_model_id_stays_the_same_between_releases() -> None:
    text = '[{"hidden_size":64,"model_type":"llama"},"main"]'

    assert (
        make_model_id({"model_type": "llama", "hidden_size": 64}, "main")
        == hashlib.sha256(text.encode()).hexdigest()[:32]
    )


def test_model_id_ignores_order_and_what_loaders_add() -> None:
    turned = json.loads(json.dumps(CONFIG, sort_keys=True))
    turned["rope"] = dict(reversed(CONFIG["rope"].items()))  # type: ignore[attr-defined]
    added = turned | {
        "_name_or_path": "/somewhere",
        "transformers_version": "5.0",
        "torch_dtype": "float32",
        "dtype": "bfloat16",
        "use_cache": False,
    }

    assert make_model_id(added, "main") == make_model_id(CONFIG, "main")


def test_model_id_changes_with_every_meaning() -> None:
    variants = [
        (CONFIG, "main"),
        (CONFIG, "other"),
        (CONFIG, ""),
        (CONFIG | {"hidden_size": 65}, "main"),
        (CONFIG | {"new_field": None}, "main"),
        (CONFIG | {"rope": {"theta": 2e4, "type": "default"}}, "main"),
    ]

    assert len({make_model_id(config, revision) for config, revision in variants}) == len(variants)


def test_making_a_model_id_changes_nothing() -> None:
    config = dict(CONFIG, use_cache=True)

    make_model_id(config, "main")

    assert config == dict(CONFIG, use_cache=True)
