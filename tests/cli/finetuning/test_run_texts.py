"""The texts of a run that do not fit are counted in sentences."""

from __future__ import annotations

from array import array

from shoal.cli.finetuning.run_texts import describe_limits
from shoal.client.finetuning.dataset import Dataset, Example


def test_texts_that_were_cut_or_skipped_are_counted() -> None:
    text = Example(array("i", range(8)))
    dataset = Dataset([text] * 1995, [text] * 5, 0, num_cut=2000, num_left_out=1)

    assert list(describe_limits(dataset, 8)) == [
        "2,000 of 2,001 texts are longer than 8 tokens and truncated (--max-length)",
        "1 of 2,001 texts is skipped: the first 8 tokens hold nothing to learn",
    ]
    assert not list(describe_limits(Dataset([], [], 0), 8))
