//! Plans: published layers and binding sets.

use std::sync::{Arc, OnceLock};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use statecopy_client::{DataType, blocking};

use crate::copy::{Manner, Prepared};
use crate::operands::{Asker, IndexOperand};
use crate::pending::Pending;
use crate::session::{Completion, Session};

/// A published plan, and what of its layout the client's own plan does not tell.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) plan: blocking::Plan,
    /// `[N, H, V, K]`.
    pub(crate) shape: [u64; 4],
    pub(crate) is_set: bool,
    /// What makes tensors of its type, once it was asked for.
    pub(crate) maker: OnceLock<Py<PyAny>>,
}

impl Published {
    pub(crate) fn dtype(&self) -> DataType {
        self.plan.as_async().dtype()
    }

    pub(crate) fn max_selected(&self) -> u64 {
        self.plan.as_async().max_selected()
    }

    /// `[selected, H, V, K]`, or `[L, selected, H, V, K]` of a binding set.
    pub(crate) fn packed_shape(&self, selected: u64) -> Vec<u64> {
        let [_, heads, values, keys] = self.shape;
        let set = self.is_set.then(|| self.plan.as_async().layers());
        set.into_iter().chain([selected, heads, values, keys]).collect()
    }
}

/// What both kinds of plan are.
#[derive(Debug)]
struct Inner {
    session: Arc<Session>,
    published: Published,
}

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

impl Inner {
    fn prepare_gather(
        &self,
        arguments: (Object<'_, '_>, Object<'_, '_>, Object<'_, '_>),
        (lane, timeout_s): (Option<i64>, Option<f64>),
        completion: Completion,
    ) -> PyResult<Prepared> {
        let py = arguments.0.py();
        let manner = Manner::new(py, lane, timeout_s, completion)?;
        Prepared::gather(py, &self.session, &self.published, arguments, manner)
    }

    fn prepare_scatter(
        &self,
        arguments: (Object<'_, '_>, Object<'_, '_>),
        (lane, timeout_s): (Option<i64>, Option<f64>),
        completion: Completion,
    ) -> PyResult<Prepared> {
        let py = arguments.0.py();
        let manner = Manner::new(py, lane, timeout_s, completion)?;
        Prepared::scatter(py, &self.session, &self.published, arguments, manner)
    }
}

/// How an operand travels.
#[pyclass(frozen, module = "statecopy", get_all)]
#[derive(Debug)]
pub(crate) struct Route {
    /// `"in_place"`, `"inline"` or `"copied"`.
    how: &'static str,
    /// Where the daemon finds it, as an address of this process; None where its values go with the request.
    address: Option<u64>,
}

#[pymethods]
impl Route {
    fn __repr__(&self) -> String {
        let address =
            self.address.map_or_else(|| "None".to_owned(), |address| format!("{address:#x}"));
        format!("Route(how={:?}, address={address})", self.how)
    }
}

macro_rules! plan_class {
    ($(#[$doc:meta])* $class:ident, $name:literal, $gather:literal, $scatter:literal, $submit_gather:literal,
     $submit_scatter:literal) => {
        $(#[$doc])*
        #[pyclass(frozen, module = "statecopy", name = $name)]
        #[derive(Debug)]
        pub(crate) struct $class(Inner);

        impl $class {
            pub(crate) fn new(session: Arc<Session>, published: Published) -> Self {
                Self(Inner { session, published })
            }
        }

        #[pymethods]
        impl $class {
            #[pyo3(name = $gather, signature = (indices, flags=None, *, out=None, lane=None, timeout_s=None))]
            fn gather<'py>(
                &self,
                py: Python<'py>,
                indices: &Bound<'py, PyAny>,
                flags: Option<&Bound<'py, PyAny>>,
                out: Option<&Bound<'py, PyAny>>,
                lane: Option<i64>,
                timeout_s: Option<f64>,
            ) -> PyResult<Bound<'py, PyAny>> {
                let none = py.None().into_bound(py);
                let arguments = (indices, flags.unwrap_or(&none), out.unwrap_or(&none));
                let completion = self.0.session.completion();
                self.0.prepare_gather(arguments, (lane, timeout_s), completion)?.run(py)
            }

            #[pyo3(name = $scatter, signature = (packed, indices, *, lane=None, timeout_s=None))]
            fn scatter(
                &self,
                py: Python<'_>,
                packed: &Bound<'_, PyAny>,
                indices: &Bound<'_, PyAny>,
                lane: Option<i64>,
                timeout_s: Option<f64>,
            ) -> PyResult<()> {
                let completion = self.0.session.completion();
                let options = (lane, timeout_s);
                self.0.prepare_scatter((packed, indices), options, completion)?.run(py).map(drop)
            }

            #[pyo3(name = $submit_gather, signature = (indices, flags=None, *, out=None, lane=None, timeout_s=None))]
            fn submit_gather(
                &self,
                py: Python<'_>,
                indices: &Bound<'_, PyAny>,
                flags: Option<&Bound<'_, PyAny>>,
                out: Option<&Bound<'_, PyAny>>,
                lane: Option<i64>,
                timeout_s: Option<f64>,
            ) -> PyResult<Pending> {
                let none = py.None().into_bound(py);
                let arguments = (indices, flags.unwrap_or(&none), out.unwrap_or(&none));
                let options = (lane, timeout_s);
                let prepared = self.0.prepare_gather(arguments, options, Completion::Host)?;
                prepared.submit(py).map(Pending::new)
            }

            #[pyo3(name = $submit_scatter, signature = (packed, indices, *, lane=None, timeout_s=None))]
            fn submit_scatter(
                &self,
                py: Python<'_>,
                packed: &Bound<'_, PyAny>,
                indices: &Bound<'_, PyAny>,
                lane: Option<i64>,
                timeout_s: Option<f64>,
            ) -> PyResult<Pending> {
                let (operands, options) = ((packed, indices), (lane, timeout_s));
                let prepared = self.0.prepare_scatter(operands, options, Completion::Host)?;
                prepared.submit(py).map(Pending::new)
            }

            /// How indices would travel with a request: the request itself is made ready in the same way.
            fn route(&self, py: Python<'_>, indices: &Bound<'_, PyAny>) -> PyResult<Route> {
                let Inner { session, published } = &self.0;
                session.check(py)?;
                let stream = session.stream(py)?;
                let asker = Asker { session, published, stream, order: None, beside: None };
                Ok(match asker.indices(indices)? {
                    // Values of the host are copied to the device, for a copy in a stream's order.
                    IndexOperand::Int32(_) | IndexOperand::Int64(_) => Route {
                        how: match session.completion() {
                            Completion::Host => "inline",
                            Completion::Stream => "copied",
                        },
                        address: None,
                    },
                    IndexOperand::Shared(_, shared) => Route {
                        how: if shared.copied_to.is_some() { "copied" } else { "in_place" },
                        address: Some(shared.address),
                    },
                })
            }

            #[getter]
            fn name(&self) -> &str {
                self.0.published.plan.as_async().name()
            }

            #[getter]
            fn dtype(&self) -> &'static str {
                self.0.published.dtype().label()
            }

            #[getter]
            fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
                PyTuple::new(py, self.0.published.shape)
            }

            #[getter]
            fn layers(&self) -> u64 {
                self.0.published.plan.as_async().layers()
            }

            #[getter]
            fn max_selected(&self) -> u64 {
                self.0.published.max_selected()
            }

            #[getter]
            fn payload_bytes(&self) -> u64 {
                self.0.published.plan.as_async().payload_bytes()
            }

            #[getter]
            fn signature(&self) -> String {
                self.0.published.plan.as_async().signature().to_string()
            }

            #[getter]
            fn kind(&self) -> Option<&'static str> {
                self.0.published.plan.as_async().kind().map(statecopy_client::PlanKind::label)
            }

            fn __repr__(&self) -> String {
                let Published { shape, .. } = &self.0.published;
                let (dtype, max_selected) =
                    (self.0.published.dtype(), self.0.published.max_selected());
                let name = self.0.published.plan.as_async().name();
                format!(concat!($name, "({:?}, {}, {:?}, max_selected={})"), name, dtype, shape, max_selected)
            }
        }
    };
}

plan_class! {
    /// A published layer.
    Plan, "Plan", "gather", "scatter", "submit_gather", "submit_scatter"
}

plan_class! {
    /// A published binding set: several layers of one signature, copied by one request.
    BindingSet, "BindingSet", "gather_all", "scatter_all", "submit_gather_all", "submit_scatter_all"
}
