"""The lane between the host and a device, and the order of what runs on it.

A device works behind the program: an operator is only *launched* when it is called, and runs later, on a stream.
So memory that the program has done with may still be read, and a copy that it has asked for may still be under way.
A lane knows about both. The pager tells it when a frame is done with (`retire`, `leave`); whoever fills a frame does it
through the lane (`fill`), and whoever uses it asks the lane first (`ready`). The one rule: nothing waits for the
device on the host, but for what the host itself is about to touch (`drain`, `Flight.wait`).

On a host everything has happened when a call returns, so its lane does nothing.

[Note: streams of the program] Operators that read parameters may run on any one stream at a time (torch's default one,
or one that the program has made current). A second stream beside the first is known from the first page that is
faulted in on it; until then it must wait for the first one itself (`stream.wait_stream`), as FSDP asks for as well.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

__all__ = ["Copies", "CudaLane", "Flight", "HostLane", "Lane", "map_memory", "open_lane"]

_log = logging.getLogger(__name__)

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""What is written, and what is read; equally long and of the same dtype."""


class Flight(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Wait on the host until they have been made: it may read what they wrote, and change what they read."""


class Lane(Protocol):
    """One for each pager. The program's thread calls it, or the one that runs backward for it."""

    def serves(self, device: torch.device) -> bool:
        """Whether tensors there need it: whether that device has memory of its own and runs behind the program."""

    # -- memory of the host

    def pin(self, memory: torch.UntypedStorage) -> None:
        """Let the device reach this memory of the host by itself, if it can be; it stays so as long as that lives."""

    def staging(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host (1-D) for one copy, which the device reaches by itself."""

    # -- frames

    def retire(self, frame: torch.Tensor) -> None:
        """What has been launched so far may still read `frame`; it will be filled again."""

    def leave(self, frame: torch.Tensor) -> None:
        """`frame` goes back to the allocator (or to who still holds it), whatever is under way in it."""

    # -- copies

    def fill(self, copies: Copies) -> Flight:
        """Begin to copy from the host into frames, beside the program, after everything that still uses them."""

    def ready(self, flight: Flight) -> None:
        """What is launched from now on finds what `flight` brings."""

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Flight]:
        """Begin to copy `source` (1-D) to the host, after what has been launched so far; `source` must not change."""

    def drain(self) -> None:
        """Wait on the host until nothing is being copied from it."""

    # -- transports that move what is on the device

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Threads of a transport may use `tensors`: it works on the default stream, which waits for them."""

    def take_over(self) -> None:
        """What is launched from now on comes after what threads of a transport have launched."""

    # -- reports

    def memory(self) -> dict[str, int]:
        """Bytes by name, as the allocator of each device counts them."""


class HostLane:
    """The host itself: nothing is ever under way."""

    def serves(self, device: torch.device) -> bool:
        return False

    def pin(self, memory: torch.UntypedStorage) -> None: ...

    def staging(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(count, dtype=dtype, device="cpu")

    def retire(self, frame: torch.Tensor) -> None: ...

    def leave(self, frame: torch.Tensor) -> None: ...

    def fill(self, copies: Copies) -> Flight:
        for frame, source in copies:
            frame.copy_(source)
        return _Landed()

    def ready(self, flight: Flight) -> None: ...

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Flight]:
        return source, _Landed()

    def drain(self) -> None: ...

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None: ...

    def take_over(self) -> None: ...

    def memory(self) -> dict[str, int]:
        return {}


class _Landed:
    def wait(self) -> None: ...


class _Copying:
    """Copies, and the event that ends those of each device; keeps alive what is read."""

    __slots__ = ("events", "sources")

    def __init__(self, events: dict[torch.device, torch.cuda.Event], sources: Sequence[torch.Tensor]) -> None:
        self.events = events
        self.sources = sources

    @property
    def over(self) -> bool:
        return all(event.query() for event in self.events.values())

    def wait(self) -> None:
        for event in self.events.values():
            event.synchronize()


class CudaLane:
    """CUDA devices: a stream for each direction, an event wherever one stream has to wait for another.

    [Note: frames and streams] A frame is written on the lane's own stream only, so fills of one frame follow each
    other. Before a fill that stream waits for events that were recorded when the frame was retired, on every
    stream of the program; for a frame fresh from the allocator, for the stream that it was allocated on: what was
    there before may still be read by it. A frame that leaves tells the allocator about the lane's stream
    (`record_stream`), so that it is given to nobody before a copy into it has ended.
    """

    def __init__(self, device: torch.device) -> None:
        home = torch.empty(0, device=device).device  # with its index
        self._inward: dict[torch.device, torch.cuda.Stream] = {}
        self._outward: dict[torch.device, torch.cuda.Stream] = {}
        # where operators have run, by device and handle
        self._program: dict[torch.device, dict[int, torch.cuda.Stream]] = {home: {}}
        self._readers: dict[int, list[torch.cuda.Event]] = {}  # by address, of frames that were retired
        self._flying: deque[_Copying] = deque()
        self._pinning_failed = False

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    # -- memory of the host

    def pin(self, memory: torch.UntypedStorage) -> None:
        if self._pinning_failed:
            return
        address, nbytes = memory.data_ptr(), memory.nbytes()
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, nbytes, 0))
        if code == 0:
            # before the memory goes; at the end of the program the driver does it
            weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
            return
        self._pinning_failed = True
        _log.warning(
            "%s bytes of host memory cannot be pinned (CUDA error %s): what is offloaded to the host is copied more "
            "slowly. A limit on locked memory (ulimit -l) may be the reason.",
            f"{nbytes:,}",
            code,
        )

    def staging(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            try:
                return torch.empty(count, dtype=dtype, device="cpu", pin_memory=not self._pinning_failed)
            except RuntimeError:  # copies from such memory are made as well, only slower
                self._pinning_failed = True
                _log.warning("host memory cannot be pinned: what is offloaded to the host is copied more slowly")
                return torch.empty(count, dtype=dtype, device="cpu")

    # -- frames

    def retire(self, frame: torch.Tensor) -> None:
        if frame.numel() and self.serves(frame.device):
            self._readers[frame.data_ptr()] = [stream.record_event() for stream in self._streams(frame.device)]

    def leave(self, frame: torch.Tensor) -> None:
        if not frame.numel() or not self.serves(frame.device):
            return
        self._readers.pop(frame.data_ptr(), None)
        for stream in (*self._streams(frame.device), self._side(self._inward, frame.device)):
            frame.record_stream(stream)

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """Where the program's operators run, as far as they have shown themselves; the present one is among them."""
        known = self._program.setdefault(device, {})
        now = torch.cuda.current_stream(device)
        known[now.cuda_stream] = now
        return list(known.values())

    def _side(self, streams: dict[torch.device, torch.cuda.Stream], device: torch.device) -> torch.cuda.Stream:
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def _follow_readers(self, stream: torch.cuda.Stream, frame: torch.Tensor) -> None:
        """Let `stream` wait for everything that may still use `frame`."""
        if not frame.numel():
            return
        readers = self._readers.pop(frame.data_ptr(), None)
        if readers is None:
            readers = [other.record_event() for other in self._streams(frame.device)]
        for event in readers:
            stream.wait_event(event)

    # -- copies

    def fill(self, copies: Copies) -> Flight:
        while self._flying and self._flying[0].over:
            self._flying.popleft()
        streams = {frame.device: self._side(self._inward, frame.device) for frame, _ in copies}
        for frame, source in copies:
            stream = streams[frame.device]
            self._follow_readers(stream, frame)
            with torch.cuda.stream(stream):
                frame.copy_(source, non_blocking=True)
        events = {device: stream.record_event() for device, stream in streams.items()}
        flight = _Copying(events, [source for _, source in copies])
        self._flying.append(flight)
        return flight

    def ready(self, flight: Flight) -> None:
        if isinstance(flight, _Copying):
            for device, event in flight.events.items():
                self._streams(device)  # from now on the present one is known
                torch.cuda.current_stream(device).wait_event(event)

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Flight]:
        host = self.staging(source.numel(), source.dtype)
        stream = self._side(self._outward, source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
        return host, _Copying({source.device: stream.record_event()}, [source])

    def drain(self) -> None:
        while self._flying:
            self._flying.popleft().wait()

    # -- transports that move what is on the device

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        handed = [tensor for tensor in tensors if tensor.numel() and self.serves(tensor.device)]
        for tensor in handed:
            default = torch.cuda.default_stream(tensor.device)
            if self._streams(tensor.device) == [default]:  # the usual program: it is in order by itself
                self._readers.pop(tensor.data_ptr(), None)
            else:
                self._follow_readers(default, tensor)
        for device in list(self._program):
            default = torch.cuda.default_stream(device)
            for stream in self._streams(device):
                if stream != default:
                    default.wait_stream(stream)
                    for tensor in handed:
                        if tensor.device == device:
                            tensor.record_stream(default)

    def take_over(self) -> None:
        for device in self._program:
            now, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
            if now != default:
                now.wait_stream(default)

    # -- reports

    def memory(self) -> dict[str, int]:
        found = {}
        for device in self._program:
            found[f"{device} allocated"] = torch.cuda.memory_allocated(device)
            found[f"{device} peak"] = torch.cuda.max_memory_allocated(device)
            found[f"{device} reserved"] = torch.cuda.memory_reserved(device)
        return found


def open_lane(device: torch.device) -> Lane:
    """The lane to `device`."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


def map_memory(nbytes: int) -> mmap.mmap:
    """Host memory of its own pages, as pinning asks for: exactly as much as is needed, rounded up to whole pages."""
    return mmap.mmap(-1, max(1, nbytes))
