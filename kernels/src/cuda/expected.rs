//! Launches that may come: a graph of the kernel, given its parameter beforehand.
//!
//! A launch is held against it as it comes, field by field. So what was expected decides how long a launch takes, and nothing else.

use super::arguments::Arguments;
use super::context::Current;
use super::kernel_graphs::HeldGraph;
use super::sys::Function;

/// The most that is expected at once. A new one takes the place of the oldest.
const EXPECTED_MAX: usize = 8;

/// What a launch gives the device beside its stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape<'a> {
    pub(super) function: Function,
    pub(super) grid: [u32; 2],
    pub(super) arguments: &'a Arguments,
}

/// A graph, and whether its kernel has the launch's grid and parameter.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) graph: HeldGraph,
    pub(super) is_set: bool,
}

#[derive(Debug)]
struct Slot {
    graph: Option<HeldGraph>,
    grid: [u32; 2],
    arguments: Box<Arguments>,
}

/// Launches that may come.
#[derive(Debug)]
pub(super) struct Expected {
    slots: [Slot; EXPECTED_MAX],
    oldest: usize,
}

impl Expected {
    /// None, and room for all that there may be.
    pub(super) fn none() -> Self {
        let slot = |_| Slot { graph: None, grid: [0, 0], arguments: Box::new(Arguments::zeroed()) };
        Self { slots: std::array::from_fn(slot), oldest: 0 }
    }

    /// Expects a launch; `free` gives a graph of its kernel that nobody holds. Where there is none, it is that of another one.
    pub(super) fn add(
        &mut self,
        current: Current<'_>,
        launch: Shape<'_>,
        free: impl FnOnce() -> Option<HeldGraph>,
    ) {
        if self.slots.iter().any(|slot| slot.is(&launch)) {
            return;
        }
        let at = self.oldest;
        self.slots[at].graph = None;
        let Some(mut graph) = free().or_else(|| self.take_any(launch.function)) else { return };
        // SAFETY: the graph was not launched since it is held.
        if unsafe { graph.set(current, launch.grid, launch.arguments) }.is_err() {
            // Its launch meets what is wrong.
            return;
        }
        let slot = &mut self.slots[at];
        (*slot.arguments).clone_from(launch.arguments);
        (slot.graph, slot.grid) = (Some(graph), launch.grid);
        self.oldest = (at + 1) % EXPECTED_MAX;
    }

    /// A graph for a launch that has come: the one that expects it, else a free one, else one that expects another launch.
    pub(super) fn take(
        &mut self,
        launch: Shape<'_>,
        free: impl FnOnce() -> Option<HeldGraph>,
    ) -> Option<Prepared> {
        let expecting = self.slots.iter_mut().find(|slot| slot.is(&launch));
        if let Some(graph) = expecting.and_then(|slot| slot.graph.take()) {
            return Some(Prepared { graph, is_set: true });
        }
        let graph = free().or_else(|| self.take_any(launch.function))?;
        Some(Prepared { graph, is_set: false })
    }

    /// The graph of this kernel that has waited for the longest time.
    fn take_any(&mut self, function: Function) -> Option<HeldGraph> {
        let (newer, older) = self.slots.split_at_mut(self.oldest);
        let mut slots = older.iter_mut().chain(newer);
        let of_it = |slot: &&mut Slot| slot.graph.as_ref().is_some_and(|it| it.is_of(function));
        slots.find(of_it).and_then(|slot| slot.graph.take())
    }

    /// Gives all graphs back.
    pub(super) fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.graph = None;
        }
    }
}

impl Slot {
    fn is(&self, launch: &Shape<'_>) -> bool {
        self.graph.as_ref().is_some_and(|graph| graph.is_of(launch.function))
            && self.grid == launch.grid
            && self.arguments.is_same_by_address(launch.arguments)
    }
}
