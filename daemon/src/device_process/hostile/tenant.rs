//! One session's memory and bindings, and what a request of it must do: an own reading of the contract.
//!
//! Whether a request is to be served is decided here by looks at every payload, and its rows are moved by the reference
//! implementation, one at a time, in a model of the regions. The executor must agree in every byte.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::param::page_size;
use statecopy_kernels::device::Moved;
use statecopy_kernels::host::HostDevice;
use statecopy_kernels::layout::{CacheLayout, Placement};
use statecopy_kernels::reference;
use statecopy_proto::{
    BindingId, DataType, Direction, IndexWidth, RegionId, SessionId, SignatureHash,
};
use statecopy_session::{CopyDescriptor, CopyRequest, FlagSource, IndexSource, MonotonicNs};

use super::guarded::Guarded;
use super::input::random_bytes;
use crate::device_process::compiled::Tables;
use crate::device_process::plans::{self, Absent};
use crate::device_process::scratch::Trials;
use crate::device_process::table::{Regions, SessionTable, Terms};
use crate::record::{LayerRecord, RegistrationRecord, SetRecord};

/// Rows of every cache.
pub(super) const ROWS: u64 = 5;
/// The most rows of a request.
pub(super) const SELECTED_MAX: u64 = 12;
/// Bytes of a page, which layers of both types share: two payloads of 96 bytes, one of 48, and a gap.
const PAGE_BYTES: u64 = 288;
/// From the first byte of row 0 to the end of the last payload, where that is the last layer of a page.
const LAYERS_BYTES: u64 = 4 * PAGE_BYTES + 240;
/// Two rows of FP32, or five of FP16.
const LAUNCH_BYTES_MAX: u64 = 256;

/// A region and what its bytes should be.
#[derive(Debug)]
struct Memory {
    id: RegionId,
    guarded: Guarded,
    model: Vec<u8>,
    fresh: Vec<u8>,
}

/// A binding or a binding set, as its worker was told of it.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) binding: BindingId,
    pub(super) signature: SignatureHash,
    placements: Vec<Placement>,
    check_unique: bool,
}

impl Target {
    pub(super) fn dtype(&self) -> DataType {
        self.placements[0].layout().dtype()
    }

    /// Bytes of the packed buffer for so many rows.
    pub(super) fn packed_bytes(&self, selected: u64) -> u64 {
        self.placements.len() as u64 * selected * self.payload()
    }

    fn payload(&self) -> u64 {
        self.placements[0].layout().payload_bytes()
    }

    fn payloads(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.placements.iter().flat_map(|placement| {
            let layout = placement.layout();
            (0..layout.rows()).map(move |row| {
                let start = placement.offset() + row * layout.page_stride_bytes();
                start..start + layout.payload_bytes()
            })
        })
    }
}

/// A session: the region of its caches, another region, and what is published.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) session: SessionId,
    memories: [Memory; 2],
    pub(super) targets: Vec<Target>,
    pub(super) table: Arc<SessionTable<HostDevice>>,
}

/// A request that is to be served, and how much of it was.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) sequence: u64,
    pub(super) request: CopyRequest,
    target: usize,
    inline: Vec<u8>,
    next: u64,
    pub(super) moved: Moved,
}

/// Layers at both ends of a region: what reaches past them reaches a guard. Binding 1 refuses repeated destinations.
fn registration(first: u64, region: RegionId, bytes: u64) -> RegistrationRecord {
    let base = bytes - LAYERS_BYTES;
    let plan = [
        (DataType::Float32, base),
        (DataType::Float32, base + 96),
        (DataType::Float16, base + 192),
        (DataType::Float16, 0),
    ];
    let layers: Vec<_> = (first..)
        .zip(plan)
        .map(|(id, (dtype, offset))| {
            let stride = PAGE_BYTES / dtype.item_bytes();
            let layout = CacheLayout::with_page_stride(dtype, [ROWS, 2, 3, 4], stride);
            LayerRecord {
                name: format!("layer {id}"),
                binding: BindingId(id),
                region,
                placement: layout.and_then(|it| it.place(offset, bytes)).expect("a valid layout"),
                max_selected: SELECTED_MAX,
                check_unique: id == first,
            }
        })
        .collect();
    let set = |id: u64, members: Range<u64>| SetRecord {
        name: format!("set {id}"),
        binding: BindingId(id),
        layers: members.map(BindingId).collect(),
    };
    let sets = vec![set(first + 4, first..first + 2), set(first + 5, first + 2..first + 4)];
    RegistrationRecord { layers, sets }
}

impl Tenant {
    /// Maps the regions `first` and `first + 1`, and publishes the bindings from `first` on.
    ///
    /// # Panics
    /// When any of that is refused.
    pub(super) fn new(device: &HostDevice, session: SessionId, first: u64) -> Self {
        let bytes = page_size() as u64;
        let memories = [first, first + 1].map(|id| {
            let guarded = Guarded::new(device, bytes);
            let fresh = random_bytes(id, page_size());
            guarded.worker.write_all_at(&fresh, 0).expect("it is as long");
            Memory { id: RegionId(id), guarded, model: fresh.clone(), fresh }
        });
        let regions: Regions<HostDevice> =
            memories.iter().map(|memory| (memory.id, Arc::clone(&memory.guarded.region))).collect();
        let registration = registration(first, RegionId(first), bytes);
        let mut targets: Vec<Target> = registration.layers.iter().map(target_of).collect();
        for set in &registration.sets {
            let members = || targets.iter().filter(|layer| set.layers.contains(&layer.binding));
            let placements = members().flat_map(|layer| layer.placements.clone()).collect();
            let check_unique = members().any(|layer| layer.check_unique);
            let signature = SignatureHash(0);
            targets.push(Target { binding: set.binding, signature, placements, check_unique });
        }
        let tools = (&mut Tables::default(), &mut Trials::default());
        let bound = plans::prepare(device, tools, registration, &mut |_| {})
            .and_then(|prepared| prepared.seal(device, &mut |_| {}))
            .and_then(|sealed| {
                let terms = Terms { hook_epoch: 0, launch_bytes_max: LAUNCH_BYTES_MAX };
                sealed.publish(device, &regions, Absent::Refused, terms)
            })
            .expect("the registration is valid")
            .targets;
        for published in plans::published(&bound) {
            let target = targets.iter_mut().find(|target| target.binding == published.binding);
            target.expect("what was asked for").signature = published.signature;
        }
        let table = Arc::new(SessionTable { regions, targets: Some(Arc::new(bound)) });
        Self { session, memories, targets, table }
    }

    /// Gives all bytes their first values again.
    pub(super) fn reset(&mut self) {
        for memory in self.memories.iter_mut().filter(|memory| memory.model != memory.fresh) {
            memory.model.clone_from(&memory.fresh);
            memory.guarded.worker.write_all_at(&memory.fresh, 0).expect("it is as long");
        }
    }

    /// Its regions: that of the caches, and the other.
    pub(super) fn regions(&self) -> [RegionId; 2] {
        self.memories.each_ref().map(|memory| memory.id)
    }

    /// Bytes of each region.
    pub(super) fn region_bytes(&self) -> u64 {
        self.memories[0].model.len() as u64
    }

    /// The worker writes into one of its regions.
    pub(super) fn write(&mut self, region: usize, offset: u64, bytes: &[u8]) {
        let memory = &mut self.memories[region];
        memory.guarded.worker.write_all_at(bytes, offset).expect("inside the region");
        let at = index(offset);
        memory.model[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Whether a request is to be served, by the rules of the contract. `inline` is its slot's inline space; one that `began`
    /// under an executor that died is never late.
    pub(super) fn judge(
        &self,
        descriptor: &CopyDescriptor,
        inline: &[u8],
        began: bool,
    ) -> Option<Job> {
        let request = descriptor.parse().ok()?;
        let at = self.targets.iter().position(|it| it.binding == request.binding)?;
        let target = &self.targets[at];
        let now = if request.selected == 0 { MonotonicNs(0) } else { MonotonicNs::now() };
        let fits = request.signature == target.signature
            && request.selected <= SELECTED_MAX
            && request.packed.dtype == target.dtype().number()
            && request.packed.bytes == target.packed_bytes(request.selected)
            && (began || request.deadline > now);
        if !fits {
            return None;
        }
        let packed =
            self.range(request.packed.region, request.packed.offset, request.packed.bytes)?;
        let caches = self.memories[0].id;
        if request.packed.region == caches && target.payloads().any(|it| meet(&it, &packed)) {
            return None;
        }
        let width = request.indices.width.bytes();
        let indices = match request.indices.source {
            IndexSource::Inline => None,
            IndexSource::Shared { region, offset } => Some((region, offset, width)),
        };
        let flags = match request.flags {
            FlagSource::None | FlagSource::Inline => None,
            FlagSource::Shared { region, offset } => Some((region, offset, 1)),
        };
        for (region, offset, width) in indices.into_iter().chain(flags) {
            let range = self.range(region, offset, request.selected * width)?;
            if region == request.packed.region && meet(&range, &packed) {
                return None;
            }
        }
        let job = Job {
            sequence: descriptor.sequence,
            request,
            target: at,
            inline: inline.to_vec(),
            next: 0,
            moved: Moved::default(),
        };
        let unique = request.direction == Direction::Gather
            || !target.check_unique
            || request.indices.source != IndexSource::Inline
            || self.destinations_are_unique(&job);
        unique.then_some(job)
    }

    fn destinations_are_unique(&self, job: &Job) -> bool {
        let mut rows: Vec<i64> = (0..job.request.selected)
            .map(|s| self.index(job, s))
            .filter(|row| u64::try_from(*row).is_ok_and(|row| row < ROWS))
            .collect();
        let all = rows.len();
        rows.sort_unstable();
        rows.dedup();
        rows.len() == all
    }

    /// A range of a region, if it lies inside and is aligned.
    fn range(&self, region: RegionId, offset: u64, bytes: u64) -> Option<Range<u64>> {
        self.memory(region)?;
        let end = offset.checked_add(bytes)?;
        (offset.is_multiple_of(16) && end <= self.region_bytes()).then_some(offset..end)
    }

    fn memory(&self, region: RegionId) -> Option<&Memory> {
        self.memories.iter().find(|memory| memory.id == region)
    }

    /// Moves the rows of one launch, in the model. True when all are moved.
    pub(super) fn advance(&mut self, job: &mut Job) -> bool {
        let target = &self.targets[job.target];
        let payload = index(target.payload());
        let all = target.placements.len() as u64 * job.request.selected;
        let end = all.min(job.next + (LAUNCH_BYTES_MAX / target.payload()).max(1));
        let packed = usize::from(job.request.packed.region == self.memories[1].id);
        for row in job.next..end {
            let placement = &self.targets[job.target].placements[index(row / job.request.selected)];
            let indices = [self.index(job, row % job.request.selected)];
            let flags = self.flag(job, row % job.request.selected).map(|flag| [flag]);
            let at = index(job.request.packed.offset) + index(row) * payload;
            let mut bytes = self.memories[packed].model[at..at + payload].to_vec();
            let layer = std::slice::from_ref(placement);
            let flags = flags.as_ref().map(<[u8; 1]>::as_slice);
            let cache = &mut self.memories[0].model;
            let moved = match job.request.direction {
                Direction::Gather => reference::gather(cache, layer, &indices, flags, &mut bytes),
                Direction::Scatter => reference::scatter(cache, layer, &indices, &bytes),
            };
            if job.request.direction == Direction::Gather {
                self.memories[packed].model[at..at + payload].copy_from_slice(&bytes);
            }
            job.moved.copied += moved.copied;
            job.moved.masked += moved.masked;
        }
        job.next = end;
        end == all
    }

    /// An index, from where the request has it, as it is there now.
    fn index(&self, job: &Job, s: u64) -> i64 {
        let width = index(job.request.indices.width.bytes());
        let (bytes, start) = match job.request.indices.source {
            IndexSource::Inline => (&job.inline, 0),
            IndexSource::Shared { region, offset } => (self.model(region), index(offset)),
        };
        let at = start + index(s) * width;
        let bytes = &bytes[at..at + width];
        match job.request.indices.width {
            IndexWidth::Int32 => i32::from_ne_bytes(bytes.try_into().expect("four bytes")).into(),
            IndexWidth::Int64 => i64::from_ne_bytes(bytes.try_into().expect("eight bytes")),
        }
    }

    fn flag(&self, job: &Job, s: u64) -> Option<u8> {
        let request = &job.request;
        match request.flags {
            FlagSource::None => None,
            FlagSource::Shared { region, offset } => {
                Some(self.model(region)[index(offset) + index(s)])
            }
            FlagSource::Inline => {
                let start = match request.indices.source {
                    IndexSource::Inline => request.selected * request.indices.width.bytes(),
                    IndexSource::Shared { .. } => 0,
                };
                Some(job.inline[index(start.next_multiple_of(16)) + index(s)])
            }
        }
    }

    fn model(&self, region: RegionId) -> &Vec<u8> {
        &self.memory(region).expect("it was judged").model
    }

    /// Compares every byte of both regions with the model.
    ///
    /// # Panics
    /// At the first byte that differs.
    pub(super) fn check(&self) {
        for memory in &self.memories {
            compare(&format!("region {}", memory.id), &memory.guarded.worker, &memory.model);
        }
    }
}

/// # Panics
/// At the first byte of the memory that is not the model's.
pub(super) fn compare(what: &str, memory: &File, model: &[u8]) {
    let mut now = vec![0; model.len()];
    memory.read_exact_at(&mut now, 0).expect("it is as long");
    if now != model {
        let at = now.iter().zip(model).position(|(now, model)| now != model);
        let at = at.unwrap_or(now.len());
        panic!("byte {at} of {what} is {}, not {}", now[at], model[at]);
    }
}

fn target_of(layer: &LayerRecord) -> Target {
    Target {
        binding: layer.binding,
        signature: SignatureHash(0),
        placements: vec![layer.placement.clone()],
        check_unique: layer.check_unique,
    }
}

fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// An offset or a count of the harness's small memories.
pub(super) fn index(number: u64) -> usize {
    usize::try_from(number).expect("small")
}
