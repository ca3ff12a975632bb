//! Graphs, what is made of them, and what they keep.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::abi::{CUresult, Opaque};
use crate::process::Answer;
use crate::streams::Work;

/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

thread_local! {
    /// Whether this thread is in a function that the driver calls.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Refuses calls of the driver in a function that the driver calls.
pub(crate) fn check_host_function() -> Answer {
    if IN_HOST_FUNCTION.get() { Err(CUresult::NOT_PERMITTED) } else { Ok(()) }
}

/// What somebody wants to hear the end of.
#[derive(Debug)]
struct UserObject {
    destroy: HostFunction,
    /// An address that is only handed on.
    data: u64,
}

impl Drop for UserObject {
    /// In a thread of the driver's, some time.
    fn drop(&mut self) {
        let (destroy, data) = (self.destroy, self.data);
        let thread = thread::Builder::new().name("stub-destroy".into());
        let started = thread.spawn(move || {
            IN_HOST_FUNCTION.set(true);
            let data = usize::try_from(data).unwrap_or(0);
            // SAFETY: the caller in C gave a function for this data, to be called once.
            unsafe { destroy(std::ptr::with_exposed_provenance_mut(data)) };
        });
        debug_assert!(started.is_ok(), "a thread starts");
    }
}

/// A kernel that was added by hand, and may be changed in what was made of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KernelNode {
    handle: Opaque,
    /// Where its work stands.
    place: usize,
    function: Opaque,
}

/// What a graph does, in the order in which it was captured or added, which is one of the orders that the graph allows.
#[derive(Debug, Default, Clone)]
struct Contents {
    work: Vec<Work>,
    kernels: Vec<KernelNode>,
}

/// A graph.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    contents: Mutex<Contents>,
    keeps: Mutex<Vec<Arc<UserObject>>>,
}

impl Graph {
    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, work: Work) {
        self.contents().work.push(work);
    }

    pub(crate) fn add_kernel(&self, handle: Opaque, function: Opaque, work: Work) {
        let mut contents = self.contents();
        let place = contents.work.len();
        contents.kernels.push(KernelNode { handle, place, function });
        contents.work.push(work);
    }

    fn keeps(&self) -> MutexGuard<'_, Vec<Arc<UserObject>>> {
        self.keeps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A graph that can be launched: a copy, with what the graph keeps.
#[derive(Debug)]
pub(crate) struct Executable {
    contents: Mutex<Contents>,
    _keeps: Vec<Arc<UserObject>>,
    turn: Mutex<()>,
}

impl Executable {
    fn of(graph: &Graph) -> Self {
        let contents = Mutex::new(graph.contents().clone());
        Self { contents, _keeps: graph.keeps().clone(), turn: Mutex::default() }
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a launch does now: later changes are for later launches.
    pub(crate) fn work(&self) -> Vec<Work> {
        self.contents().work.clone()
    }

    /// The functions of kernels that were added by hand.
    pub(crate) fn functions(&self) -> Vec<Opaque> {
        self.contents().kernels.iter().map(|node| node.function).collect()
    }

    /// Changes a kernel that was added by hand.
    pub(crate) fn set_kernel(&self, handle: Opaque, function: Opaque, work: Work) -> Answer {
        let mut contents = self.contents();
        let node = contents.kernels.iter_mut().find(|node| node.handle == handle);
        let node = node.ok_or(CUresult::INVALID_VALUE)?;
        node.function = function;
        let place = node.place;
        contents.work[place] = work;
        Ok(())
    }

    /// Held while it runs: it never runs twice at once.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handles of graphs. What is taken out of it is to be dropped without a lock.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: BTreeMap<Opaque, Arc<Graph>>,
    executables: BTreeMap<Opaque, Arc<Executable>>,
    /// With how many references their makers still have.
    objects: BTreeMap<Opaque, (Arc<UserObject>, u32)>,
}

/// Something whose handle went.
#[derive(Debug)]
#[expect(dead_code, reason = "it is only dropped")]
pub(crate) enum Gone {
    Graph(Arc<Graph>),
    Executable(Arc<Executable>),
    Object(Option<Reference>),
}

/// Of a maker.
#[derive(Debug)]
#[expect(dead_code, reason = "it is only dropped")]
pub(crate) struct Reference(Arc<UserObject>);

impl Graphs {
    pub(crate) fn add(&mut self, handle: Opaque, graph: Arc<Graph>) -> Opaque {
        self.graphs.insert(handle, graph);
        handle
    }

    pub(crate) fn graph(&self, handle: Opaque) -> Answer<&Arc<Graph>> {
        self.graphs.get(&handle).ok_or(CUresult::INVALID_VALUE)
    }

    pub(crate) fn destroy(&mut self, handle: Opaque) -> Answer<Gone> {
        self.graphs.remove(&handle).map(Gone::Graph).ok_or(CUresult::INVALID_VALUE)
    }

    pub(crate) fn instantiate(&mut self, handle: Opaque, graph: Opaque) -> Answer<Opaque> {
        let executable = Executable::of(self.graph(graph)?);
        self.executables.insert(handle, Arc::new(executable));
        Ok(handle)
    }

    pub(crate) fn executable(&self, handle: Opaque) -> Answer<Arc<Executable>> {
        self.executables.get(&handle).cloned().ok_or(CUresult::INVALID_VALUE)
    }

    pub(crate) fn destroy_executable(&mut self, handle: Opaque) -> Answer<Gone> {
        self.executables.remove(&handle).map(Gone::Executable).ok_or(CUresult::INVALID_VALUE)
    }

    pub(crate) fn create_object(
        &mut self,
        handle: Opaque,
        destroy: HostFunction,
        data: u64,
        references: u32,
    ) -> Opaque {
        let object = Arc::new(UserObject { destroy, data });
        self.objects.insert(handle, (object, references));
        handle
    }

    /// Takes references of the maker's away.
    pub(crate) fn release_object(&mut self, handle: Opaque, references: u32) -> Answer<Gone> {
        let entry = self.objects.get_mut(&handle).ok_or(CUresult::INVALID_VALUE)?;
        entry.1 = entry.1.checked_sub(references).ok_or(CUresult::INVALID_VALUE)?;
        let last = entry.1 == 0;
        let gone = last.then(|| self.objects.remove(&handle)).flatten();
        Ok(Gone::Object(gone.map(|(object, _)| Reference(object))))
    }

    /// Lets a graph keep an object; `moved` says that the references were the maker's.
    pub(crate) fn retain_object(
        &mut self,
        graph: Opaque,
        object: Opaque,
        references: u32,
        moved: bool,
    ) -> Answer {
        let kept = self.objects.get(&object).ok_or(CUresult::INVALID_VALUE)?;
        if references == 0 || (moved && kept.1 < references) {
            return Err(CUresult::INVALID_VALUE);
        }
        self.graph(graph)?.keeps().push(Arc::clone(&kept.0));
        if moved {
            // The graph has it now, so nothing goes here.
            let _moved = self.release_object(object, references)?;
        }
        Ok(())
    }
}
