//! The client, as Python calls it.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyTuple};
use statecopy_client::status::Status;
use statecopy_client::{
    Address, ConnectOptions, Error, Layer, Progress, Rebind, RefusalCode, Registration, Slice,
    Stage, Strides, Transport, blocking,
};

use crate::copy::{micros_of, seconds_of};
use crate::errors;
use crate::hooks::Hooks;
use crate::plan::{BindingSet, Plan, Published};
use crate::session::{Completion, Registered, Session};
use crate::view::View;

/// A connected client.
#[pyclass(frozen, module = "statecopy", subclass)]
#[derive(Debug)]
pub(crate) struct Client {
    session: Arc<Session>,
}

/// Connects to the daemon.
#[pyfunction]
#[pyo3(signature = (address=None, *, device=None, label="", wait_s=5.0, timeout_s=10.0, register_timeout_s=120.0, reconnect_s=None,
                    transport="ring", spin_us=50.0, pool_bytes_max=None, hooks=None, completion="host"))]
#[expect(clippy::too_many_arguments, reason = "each is a keyword of its own in Python")]
pub(crate) fn connect(
    py: Python<'_>,
    address: Option<&str>,
    device: Option<String>,
    label: &str,
    wait_s: f64,
    timeout_s: f64,
    register_timeout_s: f64,
    reconnect_s: Option<f64>,
    transport: &str,
    spin_us: f64,
    pool_bytes_max: Option<i64>,
    hooks: Option<Py<PyAny>>,
    completion: &str,
) -> PyResult<Client> {
    let completion = match completion {
        "host" => Completion::Host,
        "stream" => Completion::Stream,
        other => {
            let message = format!("{other:?} was given; \"stream\" or \"host\" is needed");
            return Err(errors::argument(py, "completion", None, &message));
        }
    };
    let transport = match transport {
        "ring" => Transport::Ring,
        "grpc" => Transport::Grpc,
        other => {
            let message = format!("{other:?} was given; \"ring\" or \"grpc\" is needed");
            return Err(errors::argument(py, "transport", None, &message));
        }
    };
    let reconnect_for = match reconnect_s {
        Some(seconds) => seconds_of(py, "reconnect_s", seconds)?,
        None => ConnectOptions::default().reconnect_for,
    };
    let pool_bytes_max = pool_bytes_max.map(|bytes| bytes_of(py, "pool_bytes_max", bytes));
    let pool_bytes_max = pool_bytes_max.transpose()?;
    let call_timeout = seconds_of(py, "timeout_s", timeout_s)?;
    let options = ConnectOptions {
        reconnect_for,
        label: label.to_owned(),
        device,
        wait_for: seconds_of(py, "wait_s", wait_s)?,
        call_timeout,
        register_timeout: seconds_of(py, "register_timeout_s", register_timeout_s)?,
        spin: micros_of(py, "spin_us", spin_us)?,
        transport,
        ..ConnectOptions::default()
    };
    let connected = py.detach(|| {
        let address = match address {
            Some(address) => address.parse().map_err(Error::from)?,
            None => Address::from_env()?,
        };
        let client = blocking::Client::connect(address, options)?;
        let guest = client.cuda_guest()?;
        Ok((client, guest))
    });
    let (client, guest) = connected.map_err(|error| errors::raise(py, &error))?;
    // The lanes of streams are words of the ring's memory.
    let completion = if transport == Transport::Ring { completion } else { Completion::Host };
    let session =
        Session::new(client, guest, Hooks::new(hooks), pool_bytes_max, (completion, call_timeout));
    Ok(Client { session: Arc::new(session) })
}

fn bytes_of(py: Python<'_>, name: &str, bytes: i64) -> PyResult<u64> {
    u64::try_from(bytes).map_err(|_| {
        let message = format!("{bytes} was given; a number of bytes, 0 or more, is needed");
        errors::argument(py, name, None, &message)
    })
}

/// A layer's cache, found in shared memory.
struct Cache {
    name: String,
    tensor: Py<PyAny>,
    layer: Layer,
}

impl Client {
    /// Finds each cache, shares its memory, and says what of its layout is wrong before the daemon is asked.
    fn caches(
        &self,
        layers: &Bound<'_, PyMapping>,
        max_selected: u64,
        check_unique: bool,
    ) -> PyResult<Vec<Cache>> {
        let mut caches = Vec::new();
        for item in layers.items()?.iter() {
            let (name, tensor): (String, Bound<'_, PyAny>) = item.extract()?;
            caches.push(self.cache(name, &tensor, max_selected, check_unique)?);
        }
        Ok(caches)
    }

    fn cache(
        &self,
        name: String,
        tensor: &Bound<'_, PyAny>,
        max_selected: u64,
        check_unique: bool,
    ) -> PyResult<Cache> {
        let py = tensor.py();
        let view = View::of(tensor, &name)?;
        let invalid =
            |message: &str| errors::argument(py, &name, Some(RefusalCode::LayoutInvalid), message);
        let (Ok(shape), Ok(strides)) = (axes(&view.shape), axes(&view.strides)) else {
            let (shape, strides) = (&view.shape, &view.strides);
            let message = format!(
                "a cache of shape {shape:?} and strides {strides:?} was given; [N, H, V, K] with sizes of 1 or more and strides of 0 or more is needed"
            );
            return Err(invalid(&message));
        };
        let Some(dtype) = view.element.known() else {
            let message = format!("a cache of dtype {} was given", view.element.label());
            return Err(invalid(&message));
        };
        if !self.session.owns(&view) {
            let (found, wanted) = (view.whose, self.session.device());
            let message = format!("the cache lies on {found}; the daemon's session is on {wanted}");
            let code = Some(RefusalCode::DeviceNotVisible);
            return Err(errors::argument(py, &name, code, &message));
        }
        let slice = self.place(py, &name, &view, dtype.item_bytes())?;
        let layer = Layer {
            name: name.clone(),
            dtype,
            shape,
            strides: Strides::Elements(strides),
            region: slice.region,
            offset_bytes: slice.offset,
            max_selected,
            check_unique,
        };
        Ok(Cache { name, tensor: tensor.clone().unbind(), layer })
    }

    /// Only the memory of a layer may move: its layout is what the plan was made for.
    fn check_layout(&self, py: Python<'_>, cache: &Cache) -> PyResult<()> {
        let Some(registered) = self.session.client.layer(&cache.name) else { return Ok(()) };
        let layout = |layer: &Layer| (layer.dtype, layer.shape, layer.strides());
        let (found, wanted) = (layout(&cache.layer), layout(&registered));
        if found == wanted {
            return Ok(());
        }
        let message = format!(
            "a cache of dtype {}, shape {:?} and strides {:?} was given; the layer was registered with {}, {:?} and {:?}",
            found.0, found.1, found.2, wanted.0, wanted.1, wanted.2
        );
        let code = RefusalCode::SignatureMismatch;
        Err(errors::argument_remedied(py, &cache.name, Some(code), &message, code.remedy()))
    }

    fn place(&self, py: Python<'_>, name: &str, view: &View, item_bytes: u64) -> PyResult<Slice> {
        let placed = self.session.place_cache(py, view.address, view.span_bytes(item_bytes))?;
        placed.ok_or_else(|| {
            errors::argument_remedied(
                py,
                name,
                Some(RefusalCode::HandleUnsupported),
                "the cache lies in ordinary memory of this process, which no other process can map",
                "Allocate it with statecopy.empty (statecopy.torch.empty for a torch tensor).",
            )
        })
    }
}

/// `[N, H, V, K]`.
fn axes(numbers: &[i64]) -> Result<[u64; 4], ()> {
    let unsigned: Result<Vec<u64>, _> =
        numbers.iter().map(|number| u64::try_from(*number)).collect();
    unsigned.map_err(|_| ())?.try_into().map_err(|_| ())
}

#[pymethods]
impl Client {
    /// Prepares, seals and publishes layers, all or none. Gives the plans of layers and of binding sets.
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 hands over what it converted")]
    #[pyo3(name = "_register", signature = (layers, max_selected, sets, check_unique, progress))]
    fn register<'py>(
        &self,
        py: Python<'py>,
        layers: &Bound<'py, PyMapping>,
        max_selected: &Bound<'py, PyAny>,
        sets: BTreeMap<String, Vec<String>>,
        check_unique: bool,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyDict>)> {
        let session = &self.session;
        session.check(py)?;
        let max_selected = read_rows(max_selected)?;
        let _turn = session.turns.take(py)?;
        let caches = self.caches(layers, max_selected, check_unique)?;
        let mut registration = Registration::new();
        for cache in &caches {
            registration = registration.layer(cache.layer.clone());
        }
        for (name, of) in &sets {
            registration = registration.set(name.clone(), of);
        }
        session.settle(py)?;
        let mut raised = None;
        let done = py.detach(|| {
            session.client.register(&registration, |now| {
                if let (Some(progress), None) = (&progress, &raised) {
                    raised = tell(progress, now).err();
                }
            })
        });
        let bindings = match done {
            Ok(bindings) => bindings,
            Err(error) => {
                // A refusal withdraws what was published; whoever did not answer withdrew nothing.
                if matches!(error, Error::Refused(_)) {
                    session.keep(py, BTreeMap::new());
                } else {
                    session.keep_as_before(py);
                }
                return Err(errors::raise(py, &error));
            }
        };
        if let Some(raised) = raised {
            return Err(raised);
        }
        let published = |name: &str, plan: &blocking::Plan, is_set: bool| {
            let first = sets.get(name).filter(|_| is_set).and_then(|layers| layers.first());
            let layer = first.map_or(name, String::as_str);
            let shape =
                caches.iter().find(|cache| cache.name == layer).map(|cache| cache.layer.shape);
            let (plan, shape) = (plan.clone(), shape.unwrap_or_default());
            Published { plan, shape, is_set, maker: OnceLock::new() }
        };
        let (plans, of_sets) = (PyDict::new(py), PyDict::new(py));
        for (name, plan) in bindings.layers() {
            let plan = Plan::new(Arc::clone(session), published(name, plan, false));
            plans.set_item(name, Bound::new(py, plan)?)?;
        }
        for (name, plan) in bindings.sets() {
            let plan = BindingSet::new(Arc::clone(session), published(name, plan, true));
            of_sets.set_item(name, Bound::new(py, plan)?)?;
        }
        session.keep(py, registered(caches));
        // Whoever registers begins anew.
        self.reset_lanes(py)?;
        Ok((plans, of_sets))
    }

    /// Moves published layers to other memory of the same signature, without preparing again. Their plans go on.
    fn rebind(&self, py: Python<'_>, layers: &Bound<'_, PyMapping>) -> PyResult<()> {
        let session = &self.session;
        session.check(py)?;
        let _turn = session.turns.take(py)?;
        let caches = self.caches(layers, 1, false)?;
        for cache in &caches {
            self.check_layout(py, cache)?;
        }
        let moves: Vec<Rebind> = caches
            .iter()
            .map(|cache| Rebind {
                layer: cache.name.clone(),
                region: cache.layer.region.clone(),
                offset_bytes: cache.layer.offset_bytes,
            })
            .collect();
        session.settle(py)?;
        py.detach(|| session.client.rebind(&moves)).map_err(|error| errors::raise(py, &error))?;
        session.keep_moved(py, registered(caches));
        Ok(())
    }

    /// Gives the memory of every published layer up, and that of free buffers: before sleep. The layers fall asleep, and a
    /// rebind wakes them.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.session.check(py)?;
        let _turn = self.session.turns.take(py)?;
        self.session.settle(py)?;
        self.session.keep(py, BTreeMap::new());
        py.detach(|| self.session.pool.trim());
        Ok(())
    }

    /// Gives back regions and pooled buffers that nothing uses. How many bytes they had.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.session.check(py)?;
        Ok(py.detach(|| {
            if let Some(streams) = self.session.streams() {
                streams.let_go();
            }
            self.session.pool.trim() + self.session.regions.trim()
        }))
    }

    /// Raises what became of copies that were put on streams and were not made. Asks nobody: a load or two for each stream.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.session.check(py)?;
        let Some(streams) = self.session.streams() else { return Ok(()) };
        streams.check(py).map_err(|failed| failed.raise(py))
    }

    /// Raises where the current stream lost a copy: a copy that is made in its order by others than the daemon is not to hide that.
    fn _check_stream(&self, py: Python<'_>) -> PyResult<()> {
        let session = &self.session;
        session.check(py)?;
        let Some(streams) = session.streams() else { return Ok(()) };
        let look = session.look(py, session.stream(py)?)?;
        streams.check_stream(look.id).map_err(|failed| failed.raise(py))
    }

    /// Lets streams that lost a copy begin anew.
    fn reset_lanes(&self, py: Python<'_>) -> PyResult<()> {
        self.session.check(py)?;
        if let Some(streams) = self.session.streams() {
            py.detach(|| streams.reset());
        }
        Ok(())
    }

    /// From now on no memory is registered at first sight: what is new is copied into a pooled buffer.
    fn freeze(&self, py: Python<'_>) -> PyResult<()> {
        self.session.check(py)?;
        self.session.regions.freeze();
        Ok(())
    }

    /// What the client did, in numbers.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = PyDict::new(py);
        self.session.counters.write_into(&counters)?;
        let (pool, regions) = (self.session.pool.counters(), self.session.regions.counters());
        counters.set_item("regions_registered", regions.registered)?;
        counters.set_item("regions_dropped", regions.dropped)?;
        counters.set_item("pool_bytes", pool.bytes)?;
        counters.set_item("pool_bytes_in_use", pool.bytes_in_use)?;
        counters.set_item("pool_buffers", pool.buffers)?;
        counters.set_item("pool_hits", pool.hits)?;
        counters.set_item("pool_misses", pool.misses)?;
        Ok(counters)
    }

    /// Whether layers are published, as far as this client knows.
    fn _has_layers(&self) -> bool {
        self.session.has_layers()
    }

    /// Whether a copy that nobody waits for may still run: it was given up, or the daemon went away under it and its device
    /// process is not known to be dead.
    fn has_stray_copies(&self, py: Python<'_>) -> PyResult<bool> {
        self.session.check(py)?;
        Ok(self.session.client.has_stray_copies())
    }

    /// Asks whether the supervisor lives.
    fn ping(&self, py: Python<'_>) -> PyResult<()> {
        self.session.check(py)?;
        let answered = py.detach(|| self.session.client.ping());
        answered.map(drop).map_err(|error| errors::raise(py, &error))
    }

    /// Everything that `statecopy status --json` prints.
    fn inspect<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.session.check(py)?;
        let reply = py.detach(|| self.session.client.inspect());
        let reply = reply.map_err(|error| errors::raise(py, &error))?;
        let text = serde_json::to_string(&Status::from(&reply));
        let text = text.map_err(|error| PyValueError::new_err(error.to_string()))?;
        PyModule::import(py, intern!(py, "json"))?.call_method1(intern!(py, "loads"), (text,))
    }

    /// What was agreed on with the daemon, or None while there is no session.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.session.check(py)?;
        let Some(session) = self.session.client.session() else { return Ok(None) };
        let info = PyDict::new(py);
        info.set_item("address", self.session.client.address().to_string())?;
        info.set_item("incarnation", session.incarnation.to_string())?;
        info.set_item("session", session.id.0)?;
        info.set_item("protocol", session.version.get())?;
        info.set_item("device", session.device.kind)?;
        info.set_item("device_name", session.device.name)?;
        let transport = match session.transport {
            Transport::Ring => "ring",
            Transport::Grpc => "grpc",
        };
        info.set_item("transport", transport)?;
        let completion = match self.session.completion() {
            Completion::Host => "host",
            Completion::Stream => "stream",
        };
        info.set_item("completion", completion)?;
        Ok(Some(info))
    }

    /// Whether the client was closed, or belongs to the parent of this process.
    #[getter]
    fn closed(&self) -> bool {
        self.session.is_closed()
    }

    /// Ends the session and gives back everything that it owned. A second time does nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.session.close(py)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.session.close(py)
    }
}

fn registered(caches: Vec<Cache>) -> BTreeMap<String, Registered> {
    let each = |cache: Cache| {
        (cache.name, Registered { _tensor: cache.tensor, region: cache.layer.region })
    };
    caches.into_iter().map(each).collect()
}

/// A count of rows, as the wire has it.
fn read_rows(max_selected: &Bound<'_, PyAny>) -> PyResult<u64> {
    max_selected.extract().map_err(|_| {
        let message = format!("{max_selected} was given; a positive integer is needed");
        errors::argument(max_selected.py(), "max_selected", None, &message)
    })
}

fn tell(progress: &Py<PyAny>, now: Progress) -> PyResult<()> {
    let stage = match now.stage {
        Stage::Preparing => "preparing",
        Stage::Sealing => "sealing",
        Stage::Publishing => "publishing",
    };
    Python::attach(|py| progress.call1(py, (stage, now.layers_done, now.layers_total)).map(drop))
}
