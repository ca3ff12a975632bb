from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, Protocol

__version__: str

class Hooks(Protocol):
    """What a tensor library adds to the plain client."""

    def wrap(self, capsule: Any) -> Any:
        """A tensor over the memory of a DLPack capsule."""
    def view(self, tensor: Any, dtype: str) -> Any:
        """The tensor's bytes as elements of another type of that size."""
    def stream(self) -> int:
        """The raw handle of the current stream of the session's device."""
    def normalise(self, role: str, tensor: Any, dtype: str) -> Any:
        """The operand ("indices", "flags", "packed") contiguous, aligned, and of that dtype."""
    def maker(self, dtype: str) -> Callable[[tuple[int, ...]], Any]:
        """What makes tensors of that type on the session's device, in the order of the current stream."""
    def upload(self, role: str, values: list[int] | list[bool]) -> Any:
        """Values ("indices", "flags") on the session's device, in the order of the current stream, which is not waited for."""
    def stage(self, into: Any, tensor: Any) -> None:
        """Copies a tensor into another of the same shape, on the current stream."""

class Tensor:
    """Memory with a layout over it, that the daemon may read and write."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str:
        """As torch writes it: "cpu" or "cuda:N"."""
    @property
    def nbytes(self) -> int:
        """Of all elements, gaps not counted."""
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...

class Route:
    """How an operand travels: "in_place", "inline" or "copied", and the address where the daemon finds it."""

    @property
    def how(self) -> str: ...
    @property
    def address(self) -> int | None: ...

class Pending(Awaitable[Any]):
    """A copy in flight. Given up when it is dropped before it was waited for; it may run yet."""

    def wait(self) -> Any:
        """Waits for the answer: the packed tensor of a gather, None of a scatter."""
    def __await__(self) -> Generator[Any, None, Any]: ...

class _Published:
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(N, H, V, K)``."""
    @property
    def layers(self) -> int:
        """How many layers one request copies."""
    @property
    def max_selected(self) -> int: ...
    @property
    def payload_bytes(self) -> int:
        """Of one state of one layer."""
    @property
    def signature(self) -> str: ...
    @property
    def kind(self) -> str | None:
        """Either "fused" or "byte_copy"."""
    def route(self, indices: Any) -> Route: ...

class Plan(_Published):
    """A published layer."""

    def gather(
        self,
        indices: Any,
        flags: Any = None,
        *,
        out: Any = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """``packed[s] = cache[indices[s]]`` where the index is valid and the flag true, zero elsewhere: ``[S, H, V, K]``."""
    def scatter(self, packed: Any, indices: Any, *, lane: int | None = None, timeout_s: float | None = None) -> None:
        """``cache[indices[s]] = packed[s]`` where the index is valid."""
    def submit_gather(
        self,
        indices: Any,
        flags: Any = None,
        *,
        out: Any = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> Pending: ...
    def submit_scatter(
        self, packed: Any, indices: Any, *, lane: int | None = None, timeout_s: float | None = None
    ) -> Pending: ...

class BindingSet(_Published):
    """A published binding set: several layers of one layout, copied by one request."""

    def gather_all(
        self,
        indices: Any,
        flags: Any = None,
        *,
        out: Any = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """As :meth:`Plan.gather`, of every layer at once: ``[L, S, H, V, K]``."""
    def scatter_all(
        self, packed: Any, indices: Any, *, lane: int | None = None, timeout_s: float | None = None
    ) -> None: ...
    def submit_gather_all(
        self,
        indices: Any,
        flags: Any = None,
        *,
        out: Any = None,
        lane: int | None = None,
        timeout_s: float | None = None,
    ) -> Pending: ...
    def submit_scatter_all(
        self, packed: Any, indices: Any, *, lane: int | None = None, timeout_s: float | None = None
    ) -> Pending: ...

class Client:
    @property
    def closed(self) -> bool: ...
    def _register(
        self,
        layers: Mapping[str, Any],
        max_selected: int,
        sets: dict[str, list[str]],
        check_unique: bool,
        progress: Callable[[str, int, int], None] | None,
    ) -> tuple[dict[str, Plan], dict[str, BindingSet]]: ...
    def rebind(self, layers: Mapping[str, Any]) -> None: ...
    def release(self) -> None: ...
    def trim(self) -> int: ...
    def freeze(self) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def _has_layers(self) -> bool: ...
    def has_stray_copies(self) -> bool: ...
    def check(self) -> None: ...
    def _check_stream(self) -> None: ...
    def reset_lanes(self) -> None: ...
    def ping(self) -> None: ...
    def info(self) -> dict[str, Any] | None: ...
    def inspect(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

def connect(
    address: str | None = None,
    *,
    device: str | None = None,
    label: str = "",
    wait_s: float = 5.0,
    timeout_s: float = 10.0,
    register_timeout_s: float = 120.0,
    reconnect_s: float | None = None,
    transport: str = "ring",
    spin_us: float = 50.0,
    pool_bytes_max: int | None = None,
    hooks: Hooks | None = None,
    completion: str = "host",
) -> Client: ...
def empty(shape: int | tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> Tensor:
    """Shareable host memory of that shape (all zero until written), with strides in elements: dense without them."""

def _forked() -> None: ...
