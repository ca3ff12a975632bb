//! The operands of a copy: what Python handed in, as the client's request takes it (contract: Both).
//!
//! ```text
//! in the pool, or in memory that can be shared ──> in place: its own address goes with the request
//! indices or flags in host memory ───────────────> inline: their values go with the request
//! anything else ─────────────────────────────────> copied once, into a pooled buffer
//! ```
//!
//! A value of device memory is never read here.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PyRange, PyTuple};
use statecopy_client::sharing::Buffer;
use statecopy_client::{DataType, Flags, IndexWidth, Indices, RefusalCode, Slice};
use statecopy_kernels::cuda::StreamLook;

use crate::bytes;
use crate::errors;
use crate::memory::find_host;
use crate::plan::Published;
use crate::session::Session;
use crate::view::{View, Whose, is_torch};

/// Indices, flags and packed buffers of a request begin at a multiple of it.
const ALIGNMENT: u64 = 16;

/// Who asks for a copy: the session, the plan, and the stream that the caller's work is queued on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker<'a> {
    pub(crate) session: &'a Session,
    pub(crate) published: &'a Published,
    pub(crate) stream: u64,
    /// What of the stream is known, where the copy is in its order.
    pub(crate) order: Option<StreamLook>,
    /// Where an operand of the same request lies that was looked at before.
    pub(crate) beside: Option<&'a Slice>,
}

/// Indices of a request.
#[derive(Debug)]
pub(crate) enum IndexOperand {
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Shared(IndexWidth, Shared),
}

/// Flags of a request.
#[derive(Debug)]
pub(crate) enum FlagOperand {
    Bytes(Vec<u8>),
    Shared(Shared),
}

/// An operand in shared memory.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) slice: Slice,
    pub(crate) elements: u64,
    /// Where it lies in this process.
    pub(crate) address: u64,
    /// The pooled buffer that it was copied to.
    pub(crate) copied_to: Option<Arc<Buffer>>,
    /// The object whose memory it is, if the request outlives the call.
    pub(crate) owner: Py<PyAny>,
}

impl IndexOperand {
    pub(crate) fn selected(&self) -> u64 {
        match self {
            Self::Int32(values) => values.len() as u64,
            Self::Int64(values) => values.len() as u64,
            Self::Shared(_, shared) => shared.elements,
        }
    }

    pub(crate) fn as_request(&self) -> Indices<'_> {
        match self {
            Self::Int32(values) => Indices::Int32(values),
            Self::Int64(values) => Indices::Int64(values),
            Self::Shared(width, shared) => Indices::Shared {
                width: *width,
                at: shared.slice.clone(),
                selected: shared.elements,
            },
        }
    }

    pub(crate) fn shared(&self) -> Option<&Shared> {
        match self {
            Self::Int32(_) | Self::Int64(_) => None,
            Self::Shared(_, shared) => Some(shared),
        }
    }
}

impl FlagOperand {
    pub(crate) fn as_request(&self) -> Flags<'_> {
        match self {
            Self::Bytes(values) => Flags::Bytes(values),
            Self::Shared(shared) => Flags::Shared(shared.slice.clone()),
        }
    }

    pub(crate) fn shared(&self) -> Option<&Shared> {
        match self {
            Self::Bytes(_) => None,
            Self::Shared(shared) => Some(shared),
        }
    }
}

/// What an operand is for: its argument's name, and the code of the closed list that names its rule.
#[derive(Debug, Clone, Copy)]
struct Role {
    name: &'static str,
    code: RefusalCode,
}

const INDICES: Role = Role { name: "indices", code: RefusalCode::IndexType };
const FLAGS: Role = Role { name: "flags", code: RefusalCode::FlagsMismatch };
const PACKED: Role = Role { name: "packed", code: RefusalCode::PackedMismatch };
const OUT: Role = Role { name: "out", code: RefusalCode::PackedMismatch };

impl Role {
    fn wrong(self, py: Python<'_>, message: &str) -> PyErr {
        errors::argument(py, self.name, Some(self.code), message)
    }
}

impl<'a> Asker<'a> {
    /// The indices of a request: INT32 or INT64, one axis. A list or range of integers is INT64.
    ///
    /// # Errors
    /// ArgumentError, as INDEX_TYPE or SELECTED_TOO_LARGE.
    pub(crate) fn indices(self, object: &Bound<'_, PyAny>) -> PyResult<IndexOperand> {
        let py = object.py();
        if is_list(object) {
            if object.get_item(0).is_ok_and(|first| first.is_instance_of::<PyBool>()) {
                let message = "a list of bools was given: a mask names no rows";
                return Err(INDICES.wrong(py, message));
            }
            let values: Vec<i64> = object.extract().map_err(|error: PyErr| {
                INDICES.wrong(py, &format!("a list of integers of 64 bits is needed: {error}"))
            })?;
            if self.order.is_none() {
                return self.bounded(py, IndexOperand::Int64(values));
            }
            self.check_selected(py, values.len() as u64)?;
            let uploaded = self.uploaded(values.into_pyobject(py)?, INDICES)?;
            return self.indices(&uploaded);
        }
        let view = self.view(object, INDICES)?;
        let width = match view.element.known() {
            Some(DataType::Int32) => IndexWidth::Int32,
            Some(DataType::Int64) => IndexWidth::Int64,
            _ => {
                let found = view.element.label();
                let message =
                    format!("a tensor of dtype {found} was given; int32 or int64 is needed");
                return Err(INDICES.wrong(py, &message));
            }
        };
        if view.shape.len() != 1 {
            let message =
                format!("a tensor of shape {:?} was given; one axis is needed", view.shape);
            return Err(INDICES.wrong(py, &message));
        }
        self.check_selected(py, view.numel())?;
        if let Some(shared) = self.vector(object, &view, INDICES)? {
            return Ok(IndexOperand::Shared(width, shared));
        }
        self.session.counters.operands_inline.add(1);
        Ok(match width {
            IndexWidth::Int32 => IndexOperand::Int32(view.values()),
            IndexWidth::Int64 => IndexOperand::Int64(view.values()),
        })
    }

    fn bounded(self, py: Python<'_>, operand: IndexOperand) -> PyResult<IndexOperand> {
        self.check_selected(py, operand.selected())?;
        self.session.counters.operands_inline.add(1);
        Ok(operand)
    }

    /// Values of the host as a tensor of the device: a copy in the order of a stream finds them there when its turn has come.
    fn uploaded<'py>(self, values: Bound<'py, PyAny>, role: Role) -> PyResult<Bound<'py, PyAny>> {
        let py = values.py();
        if self.order.is_some_and(|look| look.capture.is_some()) {
            let message = "a list was given while the current stream is captured: every replay would use the values of now";
            let remedy =
                "Give a tensor of the device, and write new values into it before each replay.";
            return Err(errors::argument_remedied(py, role.name, None, message, remedy));
        }
        self.session.counters.operands_copied.add(1);
        let uploaded = self.session.hooks.upload(role.name, values)?;
        uploaded.ok_or_else(|| errors::not_shared(py))
    }

    /// Before memory for so many rows is taken.
    fn check_selected(self, py: Python<'_>, selected: u64) -> PyResult<()> {
        let max = self.published.max_selected();
        if selected <= max {
            return Ok(());
        }
        let message = format!("{selected} rows are selected; the plan's max_selected is {max}");
        let role = Role { code: RefusalCode::SelectedTooLarge, ..INDICES };
        Err(role.wrong(py, &message))
    }

    /// Flags: bools or integers of any size and shape, `selected` of them.
    ///
    /// # Errors
    /// ArgumentError, as FLAGS_MISMATCH.
    pub(crate) fn flags(
        self,
        object: &Bound<'_, PyAny>,
        selected: u64,
    ) -> PyResult<Option<FlagOperand>> {
        if object.is_none() {
            return Ok(None);
        }
        let py = object.py();
        let wrong_count = |given: u64| {
            FLAGS.wrong(py, &format!("{given} flags were given for {selected} selected rows"))
        };
        if is_list(object) {
            let values = truths_of_list(object).map_err(|error| {
                FLAGS.wrong(py, &format!("a list of bools or integers is needed: {error}"))
            })?;
            if values.len() as u64 != selected {
                return Err(wrong_count(values.len() as u64));
            }
            if self.order.is_some() {
                let uploaded = self.uploaded(values.into_pyobject(py)?, FLAGS)?;
                return self.flags(&uploaded, selected);
            }
            self.session.counters.operands_inline.add(1);
            return Ok(Some(FlagOperand::Bytes(values.into_iter().map(u8::from).collect())));
        }
        let view = self.view(object, FLAGS)?;
        let item_bytes = match view.element.known() {
            Some(dtype) if is_flag(dtype) => dtype.item_bytes(),
            _ => {
                let found = view.element.label();
                let message =
                    format!("a tensor of dtype {found} was given; bool or an integer is needed");
                return Err(FLAGS.wrong(py, &message));
            }
        };
        if view.numel() != selected {
            return Err(wrong_count(view.numel()));
        }
        if item_bytes == 1 || !self.session.is_host() {
            if let Some(shared) = self.vector(object, &view, FLAGS)? {
                return Ok(Some(FlagOperand::Shared(shared)));
            }
        } else {
            self.session.counters.normalised.add(1);
        }
        self.session.counters.operands_inline.add(1);
        Ok(Some(FlagOperand::Bytes(match item_bytes {
            1 => view.values(),
            2 => view.truths(2),
            4 => view.truths(4),
            _ => view.truths(8),
        })))
    }

    /// What a packed tensor of that shape must be.
    fn check_packed(self, py: Python<'_>, view: &View, shape: &[u64], role: Role) -> PyResult<()> {
        let same = view.shape.len() == shape.len()
            && view.shape.iter().zip(shape).all(|(given, wanted)| given.cast_unsigned() == *wanted);
        if same {
            return Ok(());
        }
        let message = format!("a tensor of shape {:?} was given; {shape:?} is needed", view.shape);
        Err(role.wrong(py, &message))
    }

    /// The packed operand that a scatter reads, made contiguous and of the cache's dtype where the tensor library can.
    ///
    /// # Errors
    /// ArgumentError, as PACKED_MISMATCH.
    pub(crate) fn packed_in(self, object: &Bound<'_, PyAny>, shape: &[u64]) -> PyResult<Shared> {
        let view = self.view(object, PACKED)?;
        self.check_packed(object.py(), &view, shape, PACKED)?;
        if self.fits_packed(&view) {
            return self.share_or_copy(object, &view);
        }
        let dtype = self.published.dtype().label();
        let Some(better) = self.normalised(object, PACKED, dtype)? else {
            let (found, needed) = (view.element.label(), dtype);
            let message = format!(
                "a tensor of dtype {found} and strides {:?} was given; a contiguous one of {needed} is needed",
                view.strides
            );
            return Err(PACKED.wrong(object.py(), &message));
        };
        let view = self.view(&better, PACKED)?;
        self.share_or_copy(&better, &view)
    }

    /// The packed operand that a gather writes, with the view of what was given: in place where it can be shared.
    ///
    /// # Errors
    /// ArgumentError, as PACKED_MISMATCH.
    pub(crate) fn packed_out(
        self,
        object: &Bound<'_, PyAny>,
        shape: &[u64],
    ) -> PyResult<(View, Option<Shared>)> {
        let py = object.py();
        let view = self.view(object, OUT)?;
        self.check_packed(py, &view, shape, OUT)?;
        if !self.fits_packed(&view) {
            let (found, needed) = (view.element.label(), self.published.dtype().label());
            let message = format!(
                "a tensor of dtype {found} and strides {:?} was given; a contiguous one of {needed} is needed",
                view.strides
            );
            return Err(OUT.wrong(py, &message));
        }
        if view.is_read_only {
            return Err(OUT.wrong(py, "a read-only tensor was given"));
        }
        let shared = self.in_place(object, &view)?;
        // Copied back, it would go past the daemon's check that it overlaps no cache.
        let is_aligned = view.address.is_multiple_of(ALIGNMENT);
        let bytes = view.span_bytes(self.published.dtype().item_bytes());
        if !is_aligned && self.is_inline(&view) && find_host(view.address, bytes).is_some() {
            let message = format!(
                "a tensor of shared memory at address {:#x} was given; a multiple of {ALIGNMENT} is needed",
                view.address
            );
            return Err(OUT.wrong(py, &message));
        }
        Ok((view, shared))
    }

    /// A new tensor for what a gather in the order of a stream gives, of the tensor library's own memory: it belongs to the stream's
    /// order as the tensors of its kernels do. `None` where that memory cannot be shared, or the copy is host-completed.
    ///
    /// # Errors
    /// What the tensor library raises; what sharing its memory says.
    pub(crate) fn made(
        self,
        py: Python<'_>,
        shape: &[u64],
        bytes: u64,
    ) -> PyResult<Option<Shared>> {
        let Some(maker) = self.maker(py)? else { return Ok(None) };
        if bytes == 0 || self.session.makes_none() {
            return Ok(None);
        }
        let made = maker.call1((PyTuple::new(py, shape)?,))?;
        let address: u64 = made.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let slice = self.session.place(py, (address, bytes), self.beside)?;
        if slice.is_none() {
            self.session.make_no_more();
        }
        Ok(slice.map(|slice| {
            let (elements, owner) = (bytes / self.published.dtype().item_bytes(), made.unbind());
            Shared { slice, elements, address, copied_to: None, owner }
        }))
    }

    fn maker<'py>(self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Self { session, published, .. } = self;
        if self.order.is_none() {
            return Ok(None);
        }
        if let Some(maker) = published.maker.get() {
            return Ok(Some(maker.bind(py).clone()));
        }
        let maker = session.hooks.maker(py, published.dtype().label())?;
        Ok(maker.map(|maker| published.maker.get_or_init(|| maker).bind(py).clone()))
    }

    /// A pooled buffer that the copy may use: a graph's is its own.
    ///
    /// # Errors
    /// As [`Session::take`].
    pub(crate) fn take(self, py: Python<'_>, bytes: u64) -> PyResult<Arc<Buffer>> {
        match self.order {
            Some(look) if look.capture.is_some() => self.session.take_for_graph(py, bytes, look),
            _ => self.session.take(py, bytes, self.stream),
        }
    }

    fn fits_packed(self, view: &View) -> bool {
        view.element.known() == Some(self.published.dtype()) && view.is_contiguous()
    }

    fn share_or_copy(self, object: &Bound<'_, PyAny>, view: &View) -> PyResult<Shared> {
        match self.in_place(object, view)? {
            Some(shared) => Ok(shared),
            None => self.copy_once(object, view),
        }
    }

    /// Indices or flags in shared memory; `None` on the host where their values go with the request.
    fn vector(
        self,
        object: &Bound<'_, PyAny>,
        view: &View,
        role: Role,
    ) -> PyResult<Option<Shared>> {
        let is_flag = role.code == FLAGS.code;
        let one_byte = view.element.known().is_some_and(|dtype| dtype.item_bytes() == 1);
        let fits = view.is_contiguous()
            && view.address.is_multiple_of(ALIGNMENT)
            && (!is_flag || one_byte);
        if fits {
            let shared = self.in_place(object, view)?;
            return match shared {
                None if !self.is_inline(view) => self.copy_once(object, view).map(Some),
                shared => Ok(shared),
            };
        }
        if self.is_inline(view) {
            return Ok(None);
        }
        let dtype = if is_flag { DataType::Bool.label() } else { view.element.label() };
        let Some(better) = self.normalised(object, role, dtype)? else {
            let message = format!(
                "a tensor of strides {:?} at address {:#x} was given; a contiguous one at a multiple of {ALIGNMENT} is needed",
                view.strides, view.address
            );
            return Err(role.wrong(object.py(), &message));
        };
        let view = self.view(&better, role)?;
        self.share_or_copy(&better, &view).map(Some)
    }

    /// Whether values of that tensor may be read here.
    fn is_inline(self, view: &View) -> bool {
        matches!(view.whose, Whose::Of(crate::memory::Device::Host))
    }

    fn normalised<'py>(
        self,
        object: &Bound<'py, PyAny>,
        role: Role,
        dtype: &str,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !is_torch(object)? {
            return Ok(None);
        }
        let better = self.session.hooks.normalise(role.name, object, dtype)?;
        if better.is_some() {
            self.session.counters.normalised.add(1);
        }
        Ok(better)
    }

    /// A tensor of the session's device, or DEVICE_NOT_VISIBLE. Host tensors of other libraries than the plan's own may hold indices
    /// and flags, which go with the request.
    fn view(self, object: &Bound<'_, PyAny>, role: Role) -> PyResult<View> {
        let view = View::of_operand(object, role.name)?;
        let is_packed = role.code == PACKED.code;
        let goes_inline = !is_packed && self.is_inline(&view) && self.session.hooks.is_plain();
        if goes_inline || self.session.owns(&view) {
            return Ok(view);
        }
        let (found, wanted) = (view.whose, self.session.device());
        let message = format!("a tensor on {found} was given; the plan's layers are on {wanted}");
        Err(errors::elsewhere(object.py(), role.name, &message))
    }

    /// The operand at its own address; `None` where it cannot be shared.
    fn in_place(self, object: &Bound<'_, PyAny>, view: &View) -> PyResult<Option<Shared>> {
        let py = object.py();
        let item = view.element.known().map_or(1, DataType::item_bytes);
        let bytes = view.numel().saturating_mul(item);
        if !view.address.is_multiple_of(ALIGNMENT) || bytes == 0 {
            return Ok(None);
        }
        if self.is_inline(view) && !self.session.is_host() {
            return Ok(None);
        }
        let placed = self.session.place(py, (view.address, bytes), self.beside)?;
        Ok(placed.map(|slice| {
            self.session.counters.operands_in_place.add(1);
            let owner = object.clone().unbind();
            let (elements, address) = (view.numel(), view.address);
            Shared { slice, elements, address, copied_to: None, owner }
        }))
    }

    /// The operand, copied into a pooled buffer: once, on the caller's stream.
    fn copy_once(self, object: &Bound<'_, PyAny>, view: &View) -> PyResult<Shared> {
        let py = object.py();
        let session = self.session;
        let dtype = view.element.known().unwrap_or(DataType::UInt8);
        let bytes = view.numel().saturating_mul(dtype.item_bytes());
        let buffer = self.take(py, bytes)?;
        if session.is_host() {
            let (from, to) = (view.address, buffer.address());
            py.detach(|| bytes::copy(from, to, bytes));
        } else {
            let shape: Vec<u64> = view.shape.iter().map(|size| size.cast_unsigned()).collect();
            let into = session.tensor_over(py, Arc::clone(&buffer), dtype, &shape)?;
            session.hooks.stage(&into, object)?;
        }
        session.counters.operands_copied.add(1);
        session.counters.bytes_copied_to_share.add(bytes);
        let (slice, address) = (buffer.slice().clone(), buffer.address());
        let owner = object.clone().unbind();
        let elements = view.numel();
        Ok(Shared { slice, elements, address, copied_to: Some(buffer), owner })
    }
}

fn is_list(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyList>()
        || object.is_instance_of::<PyTuple>()
        || object.is_instance_of::<PyRange>()
}

fn truths_of_list(list: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    if let Ok(bools) = list.extract() {
        return Ok(bools);
    }
    let integers: Vec<i64> = list.extract()?;
    Ok(integers.into_iter().map(|integer| integer != 0).collect())
}

fn is_flag(dtype: DataType) -> bool {
    !matches!(
        dtype,
        DataType::Float32
            | DataType::BFloat16
            | DataType::Float16
            | DataType::Float64
            | DataType::Float8E4M3
            | DataType::Float8E5M2
            | DataType::Complex64
    )
}
