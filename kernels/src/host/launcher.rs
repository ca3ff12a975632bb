//! The executor's side of the host: a launch is done when it returns.

use std::ptr;

use statecopy_proto::{Direction, IndexWidth};

use super::HostDevice;
use super::caches::HostCaches;
use super::crew::Crew;
use super::memory::HostRegion;
use super::rows::{Job, address};
use super::stores::{ORDINARY, STREAM_REQUEST_BYTES_MIN, Stores};
use crate::device::{
    DeviceFault, Flags, Indices, Launch, Launcher, Moved, Region as _, Signal, Slice, Ticket,
};
use crate::hooks;
use crate::plan::Variant;

/// How many launches may await their poll at once.
pub const TICKETS_MAX: usize = 1024;

/// Copies in the calling thread, with the help of its own threads where a part is large enough to gain.
///
/// Neither [`Launcher::launch`] nor [`Launcher::poll`] allocates, locks, logs or reads the environment, whatever the request.
#[derive(Debug)]
pub struct HostLauncher {
    crew: Crew,
    streaming: Option<Stores>,
    outcomes: Box<[Option<Moved>]>,
    issued: u64,
}

impl HostLauncher {
    pub(super) fn new(crew: Crew, streaming: Option<Stores>) -> Self {
        Self { crew, streaming, outcomes: vec![None; TICKETS_MAX].into(), issued: 0 }
    }

    /// Checks the launch against its own sizes, and makes launch arguments of it.
    fn job<'a>(&self, launch: &Launch<'a, HostDevice>) -> Job<'a> {
        let caches: &HostCaches = launch.caches;
        let layout = caches.layout();
        let payload = layout.payload_bytes();
        assert_eq!(launch.variants.payload_bytes(), payload, "The variants are of another class");
        launch.assert_sizes(caches.layers().len() as u64, payload);
        let streams =
            launch.variants.streams() && launch.packed.bytes() >= STREAM_REQUEST_BYTES_MIN;
        Job {
            layers: caches.layers(),
            rows: layout.rows(),
            page_stride: address(layout.page_stride_bytes()),
            payload: address(payload),
            selected: launch.selected,
            indices: indices(&launch.indices, launch.selected),
            flags: match launch.direction {
                Direction::Gather => flags(&launch.flags, launch.selected),
                Direction::Scatter => ptr::null(),
            },
            packed: start(&launch.packed),
            direction: launch.direction,
            width: launch.indices.width(),
            stores: self.streaming.filter(|_| streams).unwrap_or(ORDINARY),
        }
    }
}

impl Launcher<HostDevice> for HostLauncher {
    fn hooked(&self) -> bool {
        hooks::launch_hook_present()
    }

    fn depth(&self) -> usize {
        1
    }

    fn has_room(&self) -> bool {
        self.outcomes[address(self.issued) % TICKETS_MAX].is_none()
    }

    fn launch(&mut self, launch: &Launch<'_, HostDevice>) -> Result<Ticket, DeviceFault> {
        let variant: Variant = launch.variant();
        let kernel = launch.variants.kernel(variant);
        let job = self.job(launch);
        hooks::at_launch(variant);
        let ticket = Ticket(self.issued);
        let outcome = &mut self.outcomes[address(ticket.0) % TICKETS_MAX];
        assert!(outcome.is_none(), "At most {TICKETS_MAX} launches await their poll");
        // SAFETY: `job` checked that indices, flags and packed hold what the launch says and that the part lies inside it;
        // `HostCaches` checked the layers against their regions. All of it is borrowed from the launch until this returns.
        *outcome = Some(unsafe { self.crew.run(&job, kernel, launch.part.clone()) });
        self.issued += 1;
        Ok(ticket)
    }

    fn launch_in_order(
        &mut self,
        launch: &Launch<'_, HostDevice>,
        _stream: u32,
        signal: Option<Signal<'_, HostDevice>>,
    ) -> Result<Ticket, DeviceFault> {
        let ticket = self.launch(launch)?;
        if let Some(signal) = signal {
            signal.words.write(signal.offset, signal.value);
        }
        Ok(ticket)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<Option<Moved>, DeviceFault> {
        let oldest = self.issued.saturating_sub(TICKETS_MAX as u64);
        assert!((oldest..self.issued).contains(&ticket.0), "The ticket is of this launcher");
        let outcome = self.outcomes[address(ticket.0) % TICKETS_MAX].take();
        assert!(outcome.is_some(), "A ticket that answered is polled no more");
        Ok(outcome)
    }
}

/// Where the indices are; there are `selected` of them.
fn indices(indices: &Indices<'_, HostRegion>, selected: u64) -> *const u8 {
    let (at, count): (*const u8, u64) = match indices {
        Indices::Int32(private) => (private.as_ptr().cast(), private.len() as u64),
        Indices::Int64(private) => (private.as_ptr().cast(), private.len() as u64),
        Indices::Shared(width, shared) => {
            let at = start(shared).cast_const();
            let aligned = match width {
                IndexWidth::Int32 => at.cast::<i32>().is_aligned(),
                IndexWidth::Int64 => at.cast::<i64>().is_aligned(),
            };
            assert!(aligned, "Indices are aligned");
            (at, shared.bytes() / width.bytes())
        }
    };
    assert_eq!(count, selected, "One index a selected row");
    at
}

/// Where the flags are, or null; there are `selected` of them.
fn flags(flags: &Flags<'_, HostRegion>, selected: u64) -> *const u8 {
    let (at, count) = match flags {
        Flags::None => return ptr::null(),
        Flags::Inline(private) => (private.as_ptr(), private.len() as u64),
        Flags::Shared(shared) => (start(shared).cast_const(), shared.bytes()),
    };
    assert_eq!(count, selected, "One flag a selected row");
    at
}

/// The first byte of a slice, which lies in its region.
fn start(slice: &Slice<'_, HostRegion>) -> *mut u8 {
    debug_assert!(slice.offset() + slice.bytes() <= slice.region().bytes(), "checked when made");
    slice.region().mapping().base().wrapping_add(address(slice.offset()))
}
