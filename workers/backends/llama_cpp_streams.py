"""Which llama.cpp stream holds which slot's state, and moving state between streams.

llama.cpp computes sequences of one batch together only if their streams lie side by side and come in
order; at every gap it starts a pass over the weights of its own. Slots come and go as they like, so the
busy ones' state is moved together, a swap per step, which costs far less than the passes it saves.
"""

import ctypes
from collections.abc import Collection

import llama_cpp

from workers.backends.protocol import StepError


class Streams:
    """The key-value cache of a context, by slot. `of` gives the stream that holds a slot now."""

    def __init__(self, context: ctypes.c_void_p, slots: int) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._of_slot = list(range(slots))
        self._slot_in = list(range(slots))

    def of(self, slot: int) -> int:
        """The stream that holds this slot."""
        return self._of_slot[slot]

    def keep(self, slot: int, length: int) -> None:
        """Cut the slot's state back to its first `length` tokens.

        Raises:
            StepError: this state cannot be cut back; the slot is empty then.
        """
        stream = self._of_slot[slot]
        if not llama_cpp.llama_memory_seq_rm(self._memory, stream, length, -1):
            self.clear(slot)
            if length:
                raise StepError(f"slot {slot} cannot be cut back to {length} tokens")

    def clear(self, slot: int) -> None:
        """Empty the slot."""
        llama_cpp.llama_memory_seq_rm(self._memory, self._of_slot[slot], -1, -1)

    def copy(self, source: int, target: int) -> None:
        """Give slot `target` the whole state of slot `source`.

        Raises:
            StepError: llama.cpp refuses.
        """
        self._write(self._of_slot[target], self._read(self._of_slot[source]))

    def gather(self, busy: Collection[int]) -> None:
        """Bring the streams of busy slots one step nearer to each other, if they are not side by side.

        Raises:
            StepError: llama.cpp refuses.
        """
        streams = {self._of_slot[slot] for slot in busy}
        last = max(streams)
        gap = next((stream for stream in range(min(streams), last) if stream not in streams), None)
        if gap is not None:
            self._swap(gap, last)

    def _swap(self, left: int, right: int) -> None:
        left_state, right_state = self._read(left), self._read(right)
        self._write(left, right_state)
        self._write(right, left_state)
        left_slot, right_slot = self._slot_in[left], self._slot_in[right]
        self._slot_in[left], self._slot_in[right] = right_slot, left_slot
        self._of_slot[left_slot], self._of_slot[right_slot] = right, left

    def _read(self, stream: int) -> "ctypes.Array[ctypes.c_uint8] | None":
        """A stream's state; None if it is empty."""
        if llama_cpp.llama_memory_seq_pos_max(self._memory, stream) < 0:
            return None
        size = llama_cpp.llama_state_seq_get_size(self._context, stream)
        state: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, state, size, stream)
        return state

    def _write(self, stream: int, state: "ctypes.Array[ctypes.c_uint8] | None") -> None:
        if state is None:
            llama_cpp.llama_memory_seq_rm(self._memory, stream, -1, -1)
        elif not llama_cpp.llama_state_seq_set_data(self._context, state, len(state), stream):
            raise StepError(f"a state of {len(state)} bytes cannot be written to stream {stream}")
