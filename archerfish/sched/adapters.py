"""Which adapters lie in the slots of the device, and which sequences use them. Numbers only.

An adapter that a running sequence uses keeps its slot. One that none uses keeps it until another adapter wants a slot:
the one with which a sequence began longest ago goes first. A sequence whose adapter has no slot waits, and others go
on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_MISSES = (
    64  # plans in which an adapter finds no slot, before another one's is kept free of further sequences for it
)


@dataclass(slots=True, eq=False)
class Slot:
    """A place for an adapter on the device."""

    number: int  # from 1 on
    num_users: int = 0  # running sequences
    is_ready: bool = False  # its adapter is there


@dataclass(slots=True)
class AdapterSlots:
    """on_load: called with an adapter and the slot that it is to be put into. `loaded` or `failed` must follow, under
    the lock of the scheduler."""

    num_slots: int
    on_load: Callable[[int, int], None]
    num_loads: int = 0
    _held: OrderedDict[int, Slot] = field(default_factory=OrderedDict)  # by adapter, in the order in which they go
    _free: deque[Slot] = field(default_factory=deque)
    _errors: dict[int, BaseException] = field(default_factory=dict)  # of adapters that could not be loaded
    _misses: Counter[int] = field(default_factory=Counter)  # plans in which an adapter found no slot
    _missing: set[int] = field(default_factory=set)  # adapters that found no slot in this plan
    _is_draining: bool = False  # in this plan, no sequence begins with the first of those that hold slots

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """The device has no adapters, and no sequence runs."""
        self._free = deque(Slot(number) for number in range(1, self.num_slots + 1))
        self._held.clear()

    def begin_plan(self) -> None:
        """`is_ready` is asked next for waiting sequences in their order."""
        self._is_draining = False
        self._missing.clear()

    def is_here(self, adapter: int) -> bool:
        """Whether an adapter is in its slot, or could not be loaded; asking changes nothing."""
        return adapter in self._errors or (adapter in self._held and self._held[adapter].is_ready)

    def is_ready(self, adapter: int) -> bool:
        """Whether a sequence can begin with an adapter now; if not, the adapter is loaded as soon as there is a
        slot."""
        slot = self._held.get(adapter)
        if slot is not None:
            return slot.is_ready and not (self._is_draining and adapter == next(iter(self._held)))
        slot = self._take_slot()
        if slot is None:
            self._misses[adapter] += adapter not in self._missing
            self._missing.add(adapter)
            self._is_draining |= self._misses[adapter] > MOST_MISSES
            return False
        del self._misses[adapter]
        self._held[adapter] = slot
        self.num_loads += 1
        self.on_load(adapter, slot.number)
        return False

    def _take_slot(self) -> Slot | None:
        if self._free:
            return self._free.popleft()
        unused = next((adapter for adapter, slot in self._held.items() if slot.is_ready and not slot.num_users), None)
        if unused is None:
            return None
        slot = self._held.pop(unused)
        slot.is_ready = False
        return slot

    def loaded(self, adapter: int) -> None:
        """The adapter is in its slot."""
        self._held[adapter].is_ready = True

    def failed(self, adapter: int, error: BaseException) -> None:
        """The adapter could not be loaded: sequences that wait for it end with this error, until `forget_error`."""
        self._free.append(self._held.pop(adapter))
        self._errors[adapter] = error

    def error_of(self, adapter: int) -> BaseException | None:
        return self._errors.get(adapter)

    def forget_error(self, adapter: int) -> None:
        self._errors.pop(adapter, None)

    def enter(self, adapter: int) -> int:
        """A sequence begins with an adapter that is ready: its slot."""
        self._held.move_to_end(adapter)
        self._held[adapter].num_users += 1
        return self._held[adapter].number

    def leave(self, adapter: int) -> None:
        """A sequence that began with an adapter uses it no longer."""
        self._held[adapter].num_users -= 1

    @property
    def is_loading(self) -> bool:
        return any(not slot.is_ready for slot in self._held.values())
