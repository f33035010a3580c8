"""Captures the work of a function on a device, to have it done again without the function."""

from abc import ABC, abstractmethod
from collections.abc import Callable


class Capturer(ABC):
    """Of a function that reads and writes the same tensors each time, makes one that is cheaper.

    What the function does must follow from the shapes of these tensors, not from their contents.
    """

    @abstractmethod
    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return what does the same on what the tensors hold then. May call the function."""


class CallingCapturer(Capturer):
    """Calls the function. It stands in for a device where there is none."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function
