"""Tells alerts to a web address that the monitor's owner has given."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict

import httpx2

from ...protocol.errors import UsageError
from ...protocol.net.clock import Clock
from ...protocol.net.retry import Backoff, Retry
from .alerts import Alert

_logger = logging.getLogger(__name__)

_MAX_ALERTS = 100
"""That wait; where there are more, the newest are kept."""

_ANSWER_SECONDS = 5.0
_FAILING = Backoff(2.0, 60.0)


class Webhook:
    """Posts one alert after the other as JSON, while `run` does; tries again what did not arrive.

    Redirects are not followed: an address inside the owner's network is asked only where the owner
    gave it.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        answer_seconds: float = _ANSWER_SECONDS,
        backoff: Backoff = _FAILING,
    ) -> None:
        """Raise UsageError for an address that is not one of HTTP."""
        try:
            self._url = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise UsageError(f"the webhook is no address: {error}") from error
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise UsageError("the webhook has to begin with https:// or http:// and name a host")
        self._attempts = Retry(backoff, clock)
        self._answer_seconds = answer_seconds
        self._alerts = deque[Alert](maxlen=_MAX_ALERTS)
        self._has_alerts = asyncio.Event()
        self.error = ""
        """Why the last alert did not arrive; empty if it did."""

    def put(self, alerts: Iterable[Alert]) -> None:
        """Tell these alerts as soon as may be."""
        self._alerts.extend(alerts)
        if self._alerts:
            self._has_alerts.set()

    async def run(self) -> None:
        """Post alerts until cancelled."""
        async with httpx2.AsyncClient(
            follow_redirects=False, timeout=self._answer_seconds
        ) as client:
            while True:
                await self._has_alerts.wait()
                if not self._alerts:
                    self._has_alerts.clear()
                    continue
                alert = self._alerts[0]
                failure = await self._post(client, alert)
                self._note(failure)
                if failure:
                    self._attempts.note_failure()
                    await self._attempts.pause()
                    continue
                self._attempts.reset()
                if self._alerts and self._alerts[0] is alert:  # newer ones may have displaced it
                    self._alerts.popleft()

    async def _post(self, client: httpx2.AsyncClient, alert: Alert) -> str:
        """Return why an alert did not arrive; nothing if it did."""
        try:
            async with (
                asyncio.timeout(self._answer_seconds),
                client.stream("POST", self._url, json=asdict(alert)) as answer,
            ):
                if answer.is_redirect:
                    return "it redirects to another address, which is not followed"
                return "" if answer.is_success else f"it answers {answer.status_code}"
        except TimeoutError:
            return f"it does not answer within {self._answer_seconds:g} s"
        except httpx2.HTTPError as error:
            return str(error) or type(error).__name__

    def _note(self, failure: str) -> None:
        # Its path may be a secret.
        error = f"the webhook at {self._url.host} gets no alerts: {failure}" if failure else ""
        if error and not self.error:
            _logger.warning("%s", error)
        self.error = error
