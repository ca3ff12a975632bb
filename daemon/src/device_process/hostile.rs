//! The executor against a worker that does as it likes: a deterministic harness for fuzzing, on one thread.
//!
//! The input is a list of things that happen: the hostile worker publishes requests, well formed or changed, writes any
//! bytes anywhere into its session memory and its regions, moves the count of submitted requests; the executor takes turns,
//! sleeps, drains, or dies and is followed by another; and a second, well-behaved worker copies. After every turn the
//! harness knows what the executor must have done:
//!
//! * a request that keeps the rules is copied, and every byte is what the reference implementation makes of the very
//!   request, indices and flags that were there when it was taken;
//! * any other is refused, and nothing moves;
//! * a ring that makes no sense is told once, and is never read again;
//! * no other byte of the session memory or of a region changes, and around each region lie pages that end the process when
//!   they are touched; the second worker is served whatever the first one does.
//!
//! Only for tests, fuzz targets and benches: the feature `hostile`.

mod guarded;
mod input;
mod request_check;
mod tenant;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::Arc;

use statecopy_kernels::device::Device;
use statecopy_kernels::guard::ServingGuard;
use statecopy_kernels::host::{HostDevice, HostOptions};
use statecopy_proto::SessionId;
use statecopy_session::CopyDescriptor;
use statecopy_session::layout::SUBMITTED;

use self::input::Input;
pub use self::request_check::{RequestCheck, Shape};
use self::tenant::{SELECTED_MAX, Tenant};
use self::worker::{Outcome, SLOTS, Shared, Worker};
use super::sessions::Sessions;
use crate::counters::Counters;
use crate::sync::AtomicU64;

/// Happenings of one input: more would only make it slow.
const HAPPENINGS_MAX: usize = 400;
/// Turns after which a ring of [`SLOTS`] requests must be empty: a launch moves two rows or more.
const TURNS_MAX: u64 = SLOTS * 2 * SELECTED_MAX + 1;

/// What came of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Requests of the hostile worker that were copied.
    pub copied: u64,
    /// Requests of the hostile worker that were refused.
    pub refused: u64,
    /// Rings that broke.
    pub broken: u64,
    /// Requests of the other worker that were copied.
    pub others: u64,
}

/// Two sessions on a host device, and the stations that serve them. Made once, for any number of inputs.
pub struct Arena {
    shared: Shared,
    hostile: Worker,
    other: Worker,
    _device: HostDevice,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").finish_non_exhaustive()
    }
}

impl Default for Arena {
    fn default() -> Self {
        Self::new()
    }
}

impl Arena {
    /// Opens the host device and both sessions.
    ///
    /// # Panics
    /// When the machine gives no memory, or the layouts are refused.
    #[must_use]
    pub fn new() -> Self {
        let guard = Arc::new(ServingGuard::new(true));
        let options = HostOptions::new(Arc::clone(&guard));
        let device = HostDevice::open(options).expect("a host device");
        let mut sessions = Sessions::new(Arc::new(AtomicU64::new(0)));
        let workers = [(1, 1), (2, 101)].map(|(session, first)| {
            let tenant = Tenant::new(&device, SessionId(session), first);
            sessions.install(tenant.session, Arc::clone(&tenant.table));
            Worker::new(tenant)
        });
        let [hostile, other] = workers;
        let (_sealed, counters) = Counters::create().expect("counters");
        let launcher = device.launcher().expect("a launcher");
        guard.shut();
        let shared = Shared { launcher, sessions, counters };
        Self { shared, hostile, other, _device: device }
    }

    /// Lets everything happen that the input says. The same input always does the same.
    ///
    /// # Panics
    /// When the executor breaks a promise.
    pub fn run(&mut self, input: &[u8]) -> Tally {
        let mut tally = Tally::default();
        let mut input = Input::new(input);
        for worker in [&mut self.hostile, &mut self.other] {
            worker.tenant.reset();
            worker.reopen();
        }
        for _ in 0..HAPPENINGS_MAX {
            let Some(what) = input.next() else { break };
            self.happen(what, &mut input, &mut tally);
        }
        self.empty(&mut tally);
        self.copy_for_the_other(&mut input, &mut tally);
        self.hostile.check();
        self.other.check();
        tally
    }

    fn happen(&mut self, what: u8, input: &mut Input<'_>, tally: &mut Tally) {
        match what % 16 {
            0..=4 => self.publish(input),
            5..=7 => {
                self.turn(tally);
            }
            8 => self.empty(tally),
            9 => self.scribble(input),
            10 => self.flip_inline(input),
            11 => self.move_the_count(input),
            12 => self.write_region(input),
            13 => self.copy_for_the_other(input, tally),
            14 => self.hostile.sleep(),
            _ => match input.below(4) {
                0 => self.hostile.close(),
                1 => self.flip_descriptor(input),
                _ => self.hostile.restart(),
            },
        }
    }

    /// The hostile worker publishes a request that is right but for what the input changes.
    fn publish(&mut self, input: &mut Input<'_>) {
        let (mut descriptor, inline) = request_of(&self.hostile.tenant, input);
        descriptor.sequence = self.hostile.submitted().wrapping_add(1);
        let mut words = descriptor.to_words();
        for _ in 0..input.below(8).saturating_sub(4) {
            // Mostly behind the sequence, which would break the ring.
            let bit = match input.below(16) {
                0 => input.below(64),
                _ => 64 + (input.word() % (1024 - 64)),
            };
            words[usize::try_from(bit / 64).unwrap_or(0)] ^= 1 << (bit % 64);
        }
        self.hostile.publish(words, &inline);
    }

    fn turn(&mut self, tally: &mut Tally) -> Outcome {
        let outcome = self.hostile.turn(&mut self.shared);
        match outcome {
            Outcome::Copied => tally.copied += 1,
            Outcome::Refused => tally.refused += 1,
            Outcome::Idle | Outcome::Moving => {}
            Outcome::Broken => {
                tally.broken += 1;
                // Whatever is written there now, it is not looked at.
                self.hostile.write(SUBMITTED, &self.hostile.taken().wrapping_add(1).to_ne_bytes());
                self.hostile.sleep();
                assert_eq!(self.hostile.turn(&mut self.shared), Outcome::Idle);
                self.hostile.close();
                self.hostile.check();
                self.hostile.reopen();
            }
        }
        outcome
    }

    /// Turns until nothing is left.
    fn empty(&mut self, tally: &mut Tally) {
        for _ in 0..TURNS_MAX {
            if matches!(self.turn(tally), Outcome::Idle | Outcome::Broken) {
                return;
            }
        }
        panic!("{TURNS_MAX} turns do not empty a ring");
    }

    /// Any bytes, anywhere in the session memory. Half of the time where words are.
    fn scribble(&mut self, input: &mut Input<'_>) {
        let end = match input.below(2) {
            0 => self.hostile.bytes(),
            _ => self.hostile.inline_at(1),
        };
        let offset = input.word() % end;
        let room = usize::try_from(self.hostile.bytes() - offset).unwrap_or(0);
        let most = 1 + usize::from(input.byte() % 64);
        let bytes = input.take(most.min(room));
        self.hostile.write(offset, bytes);
    }

    /// An index or a flag changes between the submission and the take.
    fn flip_inline(&mut self, input: &mut Input<'_>) {
        let sequence = self.hostile.taken() + 1 + input.below(SLOTS);
        let at = self.hostile.inline_at(sequence) + input.below(128);
        let byte = input.byte();
        self.hostile.write(at, &[byte]);
    }

    /// A field changes between the submission and the take.
    fn flip_descriptor(&mut self, input: &mut Input<'_>) {
        let sequence = self.hostile.taken() + 1 + input.below(SLOTS);
        let at = self.hostile.descriptor_at(sequence) + 8 + input.below(120);
        let byte = input.byte();
        self.hostile.write(at, &[byte]);
    }

    fn move_the_count(&mut self, input: &mut Input<'_>) {
        let submitted = match input.below(4) {
            0 => input.word(),
            1 => self.hostile.taken().wrapping_add(input.below(SLOTS + 2)),
            2 => self.hostile.taken().wrapping_sub(input.below(3)),
            _ => self.hostile.submitted().wrapping_add(input.below(SLOTS)),
        };
        self.hostile.write(SUBMITTED, &submitted.to_ne_bytes());
    }

    fn write_region(&mut self, input: &mut Input<'_>) {
        let region = usize::from(input.byte() % 2);
        let offset = input.word() % self.hostile.tenant.region_bytes();
        let room = self.hostile.tenant.region_bytes() - offset;
        let most = usize::try_from(room.min(1 + input.below(32))).unwrap_or(0);
        let bytes = input.take(most);
        self.hostile.tenant.write(region, offset, bytes);
    }

    /// The well-behaved worker asks for a copy, and gets it.
    fn copy_for_the_other(&mut self, input: &mut Input<'_>, tally: &mut Tally) {
        let (mut descriptor, inline) = request_of(&self.other.tenant, input);
        descriptor.sequence = self.other.submitted() + 1;
        self.other.publish(descriptor.to_words(), &inline);
        for _ in 0..TURNS_MAX {
            match self.other.turn(&mut self.shared) {
                Outcome::Moving => {}
                Outcome::Copied => {
                    tally.others += 1;
                    return;
                }
                // The input may repeat a destination where that is refused, or reach past a region.
                Outcome::Refused => return,
                Outcome::Idle | Outcome::Broken => break,
            }
        }
        panic!("the other worker was not served: {descriptor:?}");
    }
}

/// That many bytes, the same for the same seed, as an input of [`Arena::run`].
#[must_use]
pub fn input_of_seed(seed: u64, len: usize) -> Vec<u8> {
    input::random_bytes(seed, len)
}

/// A request with its inline space, as the input says: of the tenant's own bindings and regions, save for one in eight.
fn request_of(tenant: &Tenant, input: &mut Input<'_>) -> (CopyDescriptor, Vec<u8>) {
    let target = usize::try_from(input.below(8)).unwrap_or(0);
    let own = tenant.targets.get(target).map(|target| {
        let packed_bytes = |selected| target.packed_bytes(selected);
        (target.binding, target.signature, target.dtype(), packed_bytes)
    });
    let choices = input.byte();
    let selected = input.below(SELECTED_MAX + 2);
    let width: u8 = if choices & 1 == 0 { 4 } else { 8 };
    let (binding, signature, dtype, packed_bytes) = match own {
        Some((binding, signature, dtype, packed_bytes)) => {
            (binding.0, signature.0, dtype.number(), packed_bytes(selected))
        }
        None => (input.below(256), input.word(), 1, selected * 96),
    };
    let mut place = |region: u64| {
        let regions = tenant.regions();
        let region = regions.get(usize::try_from(region).unwrap_or(0)).map_or(101, |it| it.0);
        let end = tenant.region_bytes();
        // Often at the very end, or over it.
        let offset = match input.below(8) {
            0 => end - input.below(48) * 16,
            1 => input.word(),
            _ => (input.word() % end) / 16 * 16,
        };
        (region, offset)
    };
    let (packed_region, packed_offset) = place(u64::from(choices & 14 != 0));
    let packed_offset = match packed_offset % 3 {
        // So that it fits.
        0 => (packed_offset % tenant.region_bytes()).min(tenant.region_bytes() - 2304) / 16 * 16,
        _ => packed_offset,
    };
    let (index_region, index_offset) = place(u64::from(choices >> 4 & 1));
    let (flag_region, flag_offset) = place(u64::from(choices >> 5 & 1));
    let inline = inline_of(width, selected, choices, input);
    let descriptor = CopyDescriptor {
        sequence: 0,
        binding,
        signature,
        selected,
        packed_region,
        packed_offset,
        packed_bytes,
        packed_dtype: dtype,
        direction: 1 + (choices >> 6 & 1),
        index_source: if input.below(4) == 0 { 2 } else { 1 },
        index_width: width,
        flag_source: u8::try_from(input.below(3)).unwrap_or(0),
        deadline_ns: u64::MAX,
        index_region,
        index_offset,
        flag_region,
        flag_offset,
        session: input.below(3),
        submitted_at_ns: 0,
        lane: 0,
        completion: 1,
        reserved: [0; 3],
    };
    (descriptor, inline)
}

/// Indices around the valid rows, then flags.
fn inline_of(width: u8, selected: u64, choices: u8, input: &mut Input<'_>) -> Vec<u8> {
    let mut inline = Vec::new();
    for s in 0..selected {
        let index = match input.below(16) {
            0 => i64::from_le_bytes(input.word().to_le_bytes()),
            // Each row at most once, where all are small.
            small if choices & 128 == 0 => {
                i64::try_from(s).unwrap_or(0) - i64::try_from(small % 2).unwrap_or(0) * 8
            }
            small => i64::try_from(small % 8).unwrap_or(0) - 1,
        };
        inline.extend_from_slice(&index.to_ne_bytes()[..usize::from(width)]);
    }
    inline.resize(inline.len().next_multiple_of(16), 0);
    inline.extend((0..selected).map(|_| input.byte() % 3));
    inline
}
