//! Launches that may come: a graph of the kernel, given its parameter beforehand.
//!
//! A launch is held against it as it comes, field by field. So what was expected decides how long a launch takes, and nothing else.

use super::arguments::Arguments;
use super::context::Current;
use super::driver::DriverError;
use super::kernel_graphs::HeldGraph;
use super::sys::Function;

/// The most that is expected at once. Who comes later has no place.
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
    /// Which one since the start it was.
    number: u64,
}

/// Launches that may come.
#[derive(Debug)]
pub(super) struct Expected {
    slots: [Slot; EXPECTED_MAX],
    added: u64,
}

impl Expected {
    /// None, and room for all that there may be.
    pub(super) fn none() -> Self {
        let slot = |_| Slot {
            graph: None,
            grid: [0, 0],
            arguments: Box::new(Arguments::zeroed()),
            number: 0,
        };
        Self { slots: std::array::from_fn(slot), added: 0 }
    }

    /// Expects a launch, where there is a place; `free` gives a graph of its kernel that nobody holds.
    ///
    /// # Errors
    /// What the driver says. The launch is not expected then.
    pub(super) fn add(
        &mut self,
        current: Current<'_>,
        launch: Shape<'_>,
        free: impl FnOnce() -> Option<HeldGraph>,
    ) -> Result<(), DriverError> {
        if self.slots.iter().any(|slot| slot.is(&launch)) {
            return Ok(());
        }
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.graph.is_none()) else {
            return Ok(());
        };
        let Some(mut graph) = free() else { return Ok(()) };
        // SAFETY: the graph was not launched since it is held.
        unsafe { graph.set(current, launch.grid, launch.arguments) }?;
        (*slot.arguments).clone_from(launch.arguments);
        self.added += 1;
        (slot.graph, slot.grid, slot.number) = (Some(graph), launch.grid, self.added);
        Ok(())
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
        let graph = free().or_else(|| self.take_newest(launch.function))?;
        Some(Prepared { graph, is_set: false })
    }

    /// The graph of this kernel that has waited for the shortest time: where launches come in turn, the others come sooner.
    fn take_newest(&mut self, function: Function) -> Option<HeldGraph> {
        let of_it = |slot: &&mut Slot| slot.graph.as_ref().is_some_and(|it| it.is_of(function));
        let newest = self.slots.iter_mut().filter(of_it).max_by_key(|slot| slot.number)?;
        newest.graph.take()
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
