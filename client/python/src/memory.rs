//! Tensors of this crate, and the host memory of `statecopy.empty`.
//!
//! A tensor is bytes that someone owns, and a layout over them; whoever computes takes it by DLPack or by NumPy's array
//! interface. Memory of `statecopy.empty` is found again by its address, whatever library's tensor lies over it: that is how
//! a client shares it instead of copying.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use statecopy_client::{DataType, Memory};

use crate::errors;
use crate::export::{self, DL_CPU, DL_CUDA, DlDevice, Kept, Owner};
use crate::fork::Birth;
use crate::lock::lock;
use crate::sync::{AtomicU64, Ordering};

/// Where the bytes of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Whose memory it is.
    pub(crate) device: Device,
    /// Of the first element, for that device.
    pub(crate) address: u64,
}

/// Whose memory it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    /// Memory of the CPU.
    Host,
    /// A CUDA device, by its place in the order of this process's driver.
    Cuda(u32),
}

impl Device {
    pub(crate) fn to_dlpack(self) -> DlDevice {
        match self {
            Self::Host => DlDevice { kind: DL_CPU, ordinal: 0 },
            Self::Cuda(ordinal) => DlDevice { kind: DL_CUDA, ordinal: ordinal.cast_signed() },
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Allocations by their addresses.
type ByAddress = BTreeMap<u64, Weak<Allocation>>;

/// The allocations of the first process of the package, and behind them those of its forked children.
static REGISTRY: Registry = Registry::new();

/// Every [`Allocation`] that one process made and that lives. A child has its own: a lock that another thread of the parent
/// held while it forked is held in the child for ever.
struct Registry {
    allocations: Mutex<ByAddress>,
    of_child: OnceLock<Box<Self>>,
}

impl Registry {
    const fn new() -> Self {
        Self { allocations: Mutex::new(BTreeMap::new()), of_child: OnceLock::new() }
    }

    /// Those of the process that so many forks lie before.
    fn after(forks: usize) -> &'static Self {
        (0..forks)
            .fold(&REGISTRY, |registry, _| registry.of_child.get_or_init(|| Box::new(Self::new())))
    }

    /// Those that this process made.
    fn here() -> MutexGuard<'static, ByAddress> {
        let registry = Self::after(Birth::here().forks());
        lock(&registry.allocations)
    }
}

/// How many allocations are gone.
static GONE: AtomicU64 = AtomicU64::new(0);

/// Host memory of this process, found by its address as long as somebody holds it.
#[derive(Debug)]
pub(crate) struct Allocation {
    memory: Memory,
}

impl Allocation {
    fn new(memory: Memory) -> Arc<Self> {
        let allocation = Arc::new(Self { memory });
        Registry::here().insert(allocation.memory.address(), Arc::downgrade(&allocation));
        allocation
    }

    /// The shared memory itself.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // It is mapped as yet: no other allocation has the address.
        Registry::here().remove(&self.memory.address());
        GONE.fetch_add(1, Ordering::Relaxed);
    }
}

/// How many allocations are gone, in this process's life.
pub(crate) fn allocations_gone() -> u64 {
    GONE.load(Ordering::Relaxed)
}

/// The memory of `statecopy.empty` that so many bytes at a host address lie in, and how far from its start.
pub(crate) fn find_host(address: u64, bytes: u64) -> Option<(Arc<Allocation>, u64)> {
    let find = |allocations: &ByAddress| {
        let (start, allocation) = allocations.range(..=address).next_back()?;
        let allocation = allocation.upgrade()?;
        let end = (address - start).saturating_add(bytes);
        // One whose last owner this is goes when the lock is free again.
        Some((end <= allocation.memory.bytes(), allocation, address - start))
    };
    let own = find(&Registry::here());
    let found = own.filter(|(holds, ..)| *holds).or_else(|| {
        let mut parents = (0..Birth::here().forks()).map(Registry::after);
        parents.find_map(|parent| find(&*parent.allocations.try_lock().ok()?))
    });
    let (holds, allocation, offset) = found?;
    holds.then_some((allocation, offset))
}

/// Memory with a layout over it, that the daemon may read and write: of `statecopy.empty`, or the result of a gather.
#[pyclass(frozen, module = "statecopy", name = "Tensor")]
#[derive(Debug)]
pub(crate) struct Tensor {
    kept: Kept,
    place: Place,
    dtype: DataType,
    shape: Box<[u64]>,
    strides: Box<[u64]>,
}

impl Tensor {
    /// A tensor whose elements lie without gaps, in the order of their indices.
    pub(crate) fn dense(owner: Owner, place: Place, dtype: DataType, shape: &[u64]) -> Self {
        let strides = dense_strides(shape).unwrap_or_default();
        Self { kept: Kept::new(owner), place, dtype, shape: shape.into(), strides: strides.into() }
    }

    /// Where the first element lies.
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// The type of an element.
    pub(crate) fn data_type(&self) -> DataType {
        self.dtype
    }

    /// How many elements there are along each axis.
    pub(crate) fn sizes(&self) -> &[u64] {
        &self.shape
    }

    /// How many elements lie from one index to the next, along each axis.
    pub(crate) fn element_strides(&self) -> &[u64] {
        &self.strides
    }

    fn is_dense(&self) -> bool {
        dense_strides(&self.shape).is_some_and(|dense| dense == *self.strides)
    }
}

#[pymethods]
impl Tensor {
    /// The sizes, as a tuple.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The strides in elements, as a tuple.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    /// The name of the data type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.label()
    }

    /// Bytes of the elements, without gaps between them.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.item_bytes()
    }

    /// `cpu`, or `cuda:` and the ordinal.
    #[getter]
    fn device(&self) -> String {
        self.place.device.to_string()
    }

    fn __len__(&self) -> usize {
        self.shape.first().map_or(0, |size| usize::try_from(*size).unwrap_or(usize::MAX))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let shape = self.shape(py)?.repr()?;
        let (dtype, device) = (self.dtype.label(), self.place.device);
        if self.is_dense() {
            return Ok(format!("statecopy.Tensor({shape}, {dtype}, device={device})"));
        }
        let strides = self.strides(py)?.repr()?;
        Ok(format!("statecopy.Tensor({shape}, {dtype}, strides={strides}, device={device})"))
    }

    /// A DLPack capsule. What a gather returns is complete when it is returned, so no stream has to wait for it.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() && self.place.device == Device::Host {
            return Err(PyBufferError::new_err("Host memory has no stream"));
        }
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            let device = self.place.device;
            let message =
                format!("The tensor lies on {device}; copy it to another device yourself");
            return Err(PyBufferError::new_err(message));
        }
        if copy == Some(true) {
            let message =
                "The tensor is exported as it lies; copy it with the library that takes it";
            return Err(PyBufferError::new_err(message));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let owner = self.kept.owner().clone();
        export::capsule(py, owner, self.place, self.dtype, &self.shape, &self.strides, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = self.place.device.to_dlpack();
        (device.kind, device.ordinal)
    }

    /// What NumPy makes an array of.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let typestr = match self.dtype {
            DataType::Float16 => "<f2",
            DataType::Float32 => "<f4",
            DataType::Float64 => "<f8",
            DataType::Int8 => "|i1",
            DataType::Int16 => "<i2",
            DataType::Int32 => "<i4",
            DataType::Int64 => "<i8",
            DataType::UInt8 => "|u1",
            DataType::UInt16 => "<u2",
            DataType::UInt32 => "<u4",
            DataType::UInt64 => "<u8",
            DataType::Bool => "|b1",
            DataType::Complex64 => "<c8",
            DataType::BFloat16 | DataType::Float8E4M3 | DataType::Float8E5M2 => {
                let message = format!(
                    "NumPy has no data type for {}: take the tensor by DLPack, as torch.from_dlpack does",
                    self.dtype
                );
                return Err(PyTypeError::new_err(message));
            }
        };
        if self.place.device != Device::Host {
            let message = format!(
                "NumPy reads no memory of {}: take the tensor by DLPack, as torch.from_dlpack does",
                self.place.device
            );
            return Err(PyTypeError::new_err(message));
        }
        let bytes = self.strides.iter().map(|stride| stride * self.dtype.item_bytes());
        let interface = PyDict::new(py);
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (self.place.address, false))?;
        interface.set_item("strides", PyTuple::new(py, bytes.collect::<Vec<_>>())?)?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}

/// A shape, as NumPy and torch take it too: a size, or one for each axis.
fn read_shape(shape: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Ok(size) = shape.extract() {
        return Ok(vec![size]);
    }
    shape.extract().or_else(|_| {
        let given = shape.repr()?;
        let message = format!("shape: {given} was given; integers of 64 bits are needed");
        Err(PyTypeError::new_err(message))
    })
}

/// Memory that a client can share: zeroed, and of no cost until it is touched. Strides count elements; without them the
/// elements lie without gaps.
#[pyfunction]
#[pyo3(signature = (shape, dtype, strides=None))]
pub(crate) fn empty(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    strides: Option<Vec<i64>>,
) -> PyResult<Tensor> {
    let dtype = read_data_type(dtype)?;
    let shape = read_sizes(py, "shape", read_shape(shape)?, 1)?;
    let strides = match strides {
        Some(strides) if strides.len() != shape.len() => {
            let message = format!("{} strides for {} axes", strides.len(), shape.len());
            return Err(errors::argument(py, "strides", None, &message));
        }
        Some(strides) => read_sizes(py, "strides", strides, 0)?,
        None => dense_strides(&shape).ok_or_else(|| too_large(py))?,
    };
    if let Some(axis) = overlapping_axis(&shape, &strides) {
        let message = format!(
            "elements overlap: stride({axis}) is {}, and the axes inside it reach further",
            strides[axis]
        );
        return Err(errors::argument(py, "strides", None, &message));
    }
    let bytes = span_bytes(&shape, &strides, dtype).ok_or_else(|| too_large(py))?;
    let memory =
        Memory::allocate("statecopy.empty", bytes).map_err(|error| errors::raise(py, &error))?;
    let allocation = Allocation::new(memory);
    let place = Place { device: Device::Host, address: allocation.memory().address() };
    let kept = Kept::new(Owner::Memory(allocation));
    Ok(Tensor { kept, place, dtype, shape: shape.into(), strides: strides.into() })
}

fn too_large(py: Python<'_>) -> PyErr {
    errors::argument(py, "shape", None, "the tensor reaches past 2^63 bytes")
}

/// A data type by its name, or by an object of NumPy or torch that names one.
pub(crate) fn read_data_type(dtype: &Bound<'_, PyAny>) -> PyResult<DataType> {
    let text = dtype.str()?;
    let text = text.to_cow()?;
    let name = text.strip_prefix("<class '").and_then(|text| text.strip_suffix("'>"));
    let name = name.unwrap_or(&text);
    let name = name.strip_prefix("numpy.").or_else(|| name.strip_prefix("torch.")).unwrap_or(name);
    // NumPy 1 calls its truth value `bool_`.
    let name = name.strip_suffix('_').unwrap_or(name);
    DataType::ALL.into_iter().find(|dtype| dtype.label() == name).ok_or_else(|| {
        let names = DataType::ALL.map(DataType::label).join(", ");
        let message = format!("{text} is none of {names}");
        errors::argument(dtype.py(), "dtype", None, &message)
    })
}

/// Sizes or strides that are at least so large.
fn read_sizes(py: Python<'_>, about: &str, sizes: Vec<i64>, min: u64) -> PyResult<Vec<u64>> {
    if sizes.is_empty() {
        return Err(errors::argument(py, about, None, "a tensor has at least one axis"));
    }
    let read = |(axis, size): (usize, i64)| {
        u64::try_from(size).ok().filter(|size| *size >= min).ok_or_else(|| {
            let message = format!("axis {axis} has {size}, which must be at least {min}");
            errors::argument(py, about, None, &message)
        })
    };
    sizes.into_iter().enumerate().map(read).collect()
}

/// The strides of elements without gaps; `None` past 64 bits.
pub(crate) fn dense_strides(shape: &[u64]) -> Option<Vec<u64>> {
    let mut strides = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        let inside: u64 = strides[axis + 1];
        strides[axis] = inside.checked_mul(shape[axis + 1])?;
    }
    Some(strides)
}

/// The first axis, from the innermost, whose next index lies within what the axes inside it reach.
fn overlapping_axis(shape: &[u64], strides: &[u64]) -> Option<usize> {
    let mut axes: Vec<usize> = (0..shape.len()).filter(|axis| shape[*axis] > 1).collect();
    axes.sort_by_key(|axis| strides[*axis]);
    // One past the last element that the axes so far reach.
    let mut reach = 1_u64;
    for axis in axes {
        if strides[axis] < reach {
            return Some(axis);
        }
        reach = reach.saturating_add((shape[axis] - 1).saturating_mul(strides[axis]));
    }
    None
}

/// Bytes from the first element to the end of the last; `None` when they do not fit an address range.
fn span_bytes(shape: &[u64], strides: &[u64], dtype: DataType) -> Option<u64> {
    let last = shape.iter().zip(strides).try_fold(0_u64, |last, (size, stride)| {
        last.checked_add((size - 1).checked_mul(*stride)?)
    })?;
    let bytes = last.checked_add(1)?.checked_mul(dtype.item_bytes())?;
    i64::try_from(bytes).is_ok().then_some(bytes)
}
