"""Files of the Hugging Face Hub, one at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Hub:
    """The Hub as one user sees it. With None, the Hub's own client decides: it knows the token of
    `hf auth login`, and a cache in the home directory.
    """

    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None

    def fetch(self, name: str, file_name: str, commit: str | None) -> Path:
        """Return the place of a file of a repository; a cached one needs no network.

        `commit` may also be a tag or a branch; the folder of the file is named after the commit.
        Raises FileNotFoundError if the repository has no such file, and ModelError in one sentence.
        """
        # Only Hub users pay for this import, and a local directory works without the network.
        from huggingface_hub import errors, hf_hub_download

        try:
            return Path(
                hf_hub_download(
                    name, file_name, revision=commit, token=self.token, cache_dir=self.cache_dir
                )
            )
        except errors.LocalEntryNotFoundError as error:
            raise ModelError(
                f"there is no directory {name!r} here, and the Hub cannot be reached for "
                f"{file_name}; check the path or the network"
            ) from error
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise ModelError(
                f"there is no directory {name!r} here, and the Hub has no such model or "
                "revision that you may read; check the name"
            ) from error
        except errors.EntryNotFoundError as error:
            raise FileNotFoundError(file_name) from error
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
            raise ModelError(f"fetching {file_name} of {name} failed: {error}") from error


DEFAULT_HUB = Hub()


def is_hub_id(name: str) -> bool:
    """Return whether a text can be the name of a repository.

    >>> is_hub_id("org/model"), is_hub_id("./model")
    (True, False)
    """
    return _HUB_ID.fullmatch(name) is not None
