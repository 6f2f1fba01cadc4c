"""The only module that imports nixl: one NIXL agent, registered memory, READs by slot number.

NIXL 1.5, backend UCX. Installed by hand (`pip install --no-deps nixl nixl-cu12`); where it is not,
NixlUnavailable says so. Called by nixl_source.py (readers) and by whoever starts a PeerServer
(NixlExport). One thread at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import uuid
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import StoreUnavailable
from kvcache.slab import HEADER_BYTES, Slab
from kvcache.transport.staging import StagingPool
from kvcache.transport.wire import SlabDescription

if TYPE_CHECKING:
    from types import ModuleType

_BACKEND: Final = "UCX"


class NixlUnavailable(StoreUnavailable):
    """nixl is not installed here, or its UCX backend does not start."""


class ReadState(Enum):
    """Of a transfer. Only after DONE and FAILED does nothing write to its staging any more."""

    FLYING = "flying"
    DONE = "done"
    FAILED = "failed"


def _import_nixl() -> ModuleType:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise NixlUnavailable(f"nixl cannot be imported: {error}") from error


def _agent(*, progress_thread: bool) -> Any:  # noqa: ANN401 - nixl has no types
    api = _import_nixl()
    config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[_BACKEND])
    try:
        return api.nixl_agent(f"headwater-{uuid.uuid4().hex}", config)
    except Exception as error:  # its own exceptions share no base
        raise NixlUnavailable(f"NIXL does not start: {error}") from error


def _address(memory: NDArray[np.uint8]) -> int:
    return int(memory.ctypes.data)


class NixlExport:
    """The node's side: makes slabs readable for peers, for as long as it lives.

    Its progress thread answers READs where the network cannot do so by itself (UCX over TCP).
    """

    def __init__(self) -> None:
        """Raises NixlUnavailable."""
        self._lock = threading.Lock()
        self._agent = _agent(progress_thread=True)
        self._registered: dict[int, Any] = {}  # by the address of the data

    def describe(self, slab: Slab) -> SlabDescription:
        """Registers the slab, once. Raises StoreUnavailable."""
        data, headers = slab.memory
        regions = [(_address(memory), memory.size, 0, "") for memory in (data, headers)]
        with self._lock:
            try:
                if _address(data) not in self._registered:
                    registered = self._agent.register_memory(regions, "DRAM", [_BACKEND])
                    self._registered[_address(data)] = registered
                metadata = self._agent.get_agent_metadata()
            except Exception as error:
                raise StoreUnavailable(f"the slab cannot be registered: {error}") from error
        geometry = slab.geometry
        return SlabDescription(
            metadata,
            _address(data),
            _address(headers),
            geometry.slots_total,
            geometry.slot_bytes,
            geometry.stride_bytes,
        )

    def close(self) -> None:
        """Takes the registrations back. Peers' READs fail from then on."""
        with self._lock:
            for registered in self._registered.values():
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(registered)
            self._registered.clear()


class NixlTransfer:
    """One posted READ. Release it when it is DONE or FAILED, never before."""

    def __init__(self, agent: Any, handle: Any) -> None:  # noqa: ANN401 - nixl has no types
        self._agent = agent
        self._handle = handle
        self._state = ReadState.FLYING

    def post(self) -> None:
        """Begins it. A READ that cannot begin has FAILED."""
        try:
            self._note(self._agent.transfer(self._handle))
        except Exception:  # noqa: BLE001 - its own exceptions share no base
            self._state = ReadState.FAILED

    def poll(self) -> ReadState:
        """Drives NIXL on and says how far the READ is. An error is its end."""
        if self._state is ReadState.FLYING:
            try:
                self._note(self._agent.check_xfer_state(self._handle))
            except Exception:  # noqa: BLE001 - the peer is gone: NIXL says so by raising
                self._state = ReadState.FAILED
        return self._state

    def _note(self, status: str) -> None:
        self._state = {"DONE": ReadState.DONE, "PROC": ReadState.FLYING}.get(
            status, ReadState.FAILED
        )

    def release(self) -> None:
        """Gives the handle back."""
        assert self._state is not ReadState.FLYING, "a released READ may still write"
        with contextlib.suppress(Exception):
            self._handle.release()


class NixlReader:
    """A reader's agent for one peer: its staging and the peer's slab as prepared descriptors.

    `headers` is uint8, shape (staging slots, HEADER_BYTES): where read_headers() lands.
    """

    def __init__(self, staging: StagingPool) -> None:
        """Registers the staging. Raises NixlUnavailable."""
        self._agent = _agent(progress_thread=False)
        slots = len(staging.memory)
        self.headers = np.zeros((slots, HEADER_BYTES), dtype=np.uint8)
        self._slots = slots
        self._local_data = self._local(staging.memory)
        self._local_headers = self._local(self.headers)
        self._remote_name: str | None = None
        self._remote_data: Any = None
        self._remote_headers: Any = None

    def _local(self, memory: NDArray[np.uint8]) -> Any:  # noqa: ANN401 - nixl has no types
        size = memory.shape[1]
        try:
            region = (_address(memory), memory.size, 0, "")
            self._agent.register_memory([region], "DRAM", [_BACKEND])
            rows = [(_address(memory) + n * size, size, 0) for n in range(len(memory))]
            return self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM", [_BACKEND])
        except Exception as error:
            raise NixlUnavailable(f"staging cannot be registered: {error}") from error

    def attach(self, slab: SlabDescription) -> None:
        """Mutates: READs are of this slab from now on. Raises StoreUnavailable."""
        self.detach()
        total, size = slab.slots_total, slab.slot_bytes
        data = [(slab.data_address + n * slab.stride_bytes, size, 0) for n in range(total)]
        headers = [(slab.headers_address + n * HEADER_BYTES, HEADER_BYTES, 0) for n in range(total)]
        try:
            name = self._agent.add_remote_agent(slab.agent_metadata)
            self._remote_name = name if isinstance(name, str) else name.decode()
            remote = self._remote_name
            self._remote_data = self._agent.prep_xfer_dlist(remote, data, "DRAM", [_BACKEND])
            self._remote_headers = self._agent.prep_xfer_dlist(remote, headers, "DRAM", [_BACKEND])
        except Exception as error:
            self.detach()
            raise StoreUnavailable(f"the peer's slab cannot be used: {error}") from error

    def detach(self) -> None:
        """Mutates: forgets the peer."""
        self._remote_data = self._remote_headers = None
        if self._remote_name is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._remote_name)
        self._remote_name = None

    def read_slots(self, staging_slots: Sequence[int], slots: Sequence[int]) -> NixlTransfer:
        """Begins to copy the peer's slots into ours. Raises StoreUnavailable."""
        return self._read(self._local_data, staging_slots, self._remote_data, slots)

    def read_headers(self, staging_slots: Sequence[int], slots: Sequence[int]) -> NixlTransfer:
        """Begins to copy the peer's headers into `headers`. Raises StoreUnavailable."""
        return self._read(self._local_headers, staging_slots, self._remote_headers, slots)

    def _read(
        self,
        local: Any,  # noqa: ANN401 - nixl has no types
        staging_slots: Sequence[int],
        remote: Any,  # noqa: ANN401
        slots: Sequence[int],
    ) -> NixlTransfer:
        try:
            handle = self._agent.make_prepped_xfer(
                "READ", local, list(staging_slots), remote, list(slots)
            )
        except Exception as error:
            raise StoreUnavailable(f"the READ cannot be made: {error}") from error
        transfer = NixlTransfer(self._agent, handle)
        transfer.post()
        return transfer
