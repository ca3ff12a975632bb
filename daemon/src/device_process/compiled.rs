//! Compiled tables, and who shares them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use statecopy_kernels::device::{Configuration, Device};
use statecopy_kernels::layout::Placement;
use statecopy_kernels::plan::Variant;
use statecopy_kernels::signature::Signature;
use statecopy_proto::{PlanKind, Refusal, RefusalCode, SignatureHash};

use crate::record::{PlanInspection, PlanState};
use crate::sync::{AtomicU64, Ordering};

/// The compiled variants of one (plan kind, signature, configuration). Immutable; shared by layers and workers.
#[derive(Debug)]
pub(super) struct CompiledTable<D: Device> {
    pub(super) kind: PlanKind,
    pub(super) signature: Signature,
    pub(super) hash: SignatureHash,
    pub(super) variants: D::Variants,
    configuration: Configuration,
    launches: [AtomicU64; Variant::ALL.len()],
}

impl<D: Device> CompiledTable<D> {
    /// A table whose every variant ran once.
    pub(super) fn new(
        kind: PlanKind,
        signature: Signature,
        variants: D::Variants,
        configuration: Configuration,
    ) -> Self {
        let hash = signature.hash();
        Self { kind, signature, hash, variants, configuration, launches: Default::default() }
    }

    /// Counts a launch.
    pub(super) fn count(&self, variant: Variant) {
        self.launches[variant.ordinal()].fetch_add(1, Ordering::Relaxed);
    }

    /// Checks that a layer may move to another place under this table.
    ///
    /// # Errors
    /// SIGNATURE_MISMATCH naming both signatures.
    pub(super) fn check_signature(
        &self,
        device: &D,
        layer: &str,
        placement: &Placement,
    ) -> Result<(), Refusal> {
        let uuid = device.description().uuid;
        let moved = Signature::new(uuid, placement.layout().clone(), placement.offset());
        if moved == self.signature {
            return Ok(());
        }
        let sentence = format!(
            "Layer {layer} is sealed under signature {} and cannot move to one of {}",
            self.hash,
            moved.hash()
        );
        Err(Refusal::new(RefusalCode::SignatureMismatch, sentence).about(layer))
    }

    fn serves(&self, kind: PlanKind, signature: &Signature, configuration: &Configuration) -> bool {
        self.kind == kind && self.signature == *signature && self.configuration == *configuration
    }

    fn inspect(&self, bindings: u32) -> PlanInspection {
        let launches = |variant: &Variant| {
            (variant.label().to_owned(), self.launches[variant.ordinal()].load(Ordering::Relaxed))
        };
        PlanInspection {
            signature: self.hash,
            plan: self.kind,
            layout: self.signature.layout().clone(),
            base_mod_16: self.signature.base_mod_16(),
            state: if bindings > 0 { PlanState::Published } else { PlanState::Sealed },
            variants: Variant::of(self.kind).iter().map(launches).collect(),
            bindings,
        }
    }
}

/// Every table that something still uses. It owns none of them.
#[derive(Debug)]
pub(super) struct Tables<D: Device> {
    tables: Vec<Weak<CompiledTable<D>>>,
}

impl<D: Device> Default for Tables<D> {
    fn default() -> Self {
        Self { tables: Vec::new() }
    }
}

impl<D: Device> Tables<D> {
    /// The table that serves a layer, if there is one.
    pub(super) fn find(
        &self,
        kind: PlanKind,
        signature: &Signature,
        configuration: &Configuration,
    ) -> Option<Arc<CompiledTable<D>>> {
        let mut live = self.tables.iter().filter_map(Weak::upgrade);
        live.find(|table| table.serves(kind, signature, configuration))
    }

    /// Lets later layers find a table.
    pub(super) fn remember(&mut self, table: &Arc<CompiledTable<D>>) {
        self.tables.retain(|table| table.strong_count() > 0);
        self.tables.push(Arc::downgrade(table));
    }

    /// What `statecopy status` shows. `users`: the table of every binding of every session.
    pub(super) fn inspect<'a>(
        &self,
        users: impl Iterator<Item = &'a Arc<CompiledTable<D>>>,
    ) -> Vec<PlanInspection> {
        let mut bindings: HashMap<*const CompiledTable<D>, u32> = HashMap::new();
        for table in users {
            *bindings.entry(Arc::as_ptr(table)).or_default() += 1;
        }
        let count = |table: &Arc<_>| bindings.get(&Arc::as_ptr(table)).copied().unwrap_or(0);
        let live = self.tables.iter().filter_map(Weak::upgrade);
        live.map(|table| table.inspect(count(&table))).collect()
    }
}
