//! Messages between supervisor and device process. The two trust each other's word, not each other's health.
#![no_main]

use libfuzzer_sys::fuzz_target;
use statecopy_kernels::device::DeviceDescription;
use statecopy_proto::Refusal;
use statecopyd::link::{Reply, Request, SlotMessage, decode, encode, join};
use statecopyd::record::{LayerRecord, RebindRecord, SlotRecord};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = decode::<Request>(bytes) {
        // What was understood is written and understood again.
        let again = encode(message.id, &message.body).expect("it was read");
        assert_eq!(decode::<Request>(&again).expect("it was written").id, message.id);
        match message.body {
            Request::Register { layers, .. } => {
                for layer in layers {
                    let _ = LayerRecord::try_from(layer);
                }
            }
            Request::Rebind { layers, .. } => {
                for layer in layers {
                    let _ = RebindRecord::try_from(layer);
                }
            }
            Request::ArmGraphs { slots, .. } => {
                for slot in slots {
                    let Ok(record) = SlotRecord::try_from(slot) else { continue };
                    let again = SlotRecord::try_from(SlotMessage::from(&record));
                    assert_eq!(again.expect("it was written"), record);
                }
            }
            Request::ImportRegion { pieces, .. } => drop(join(pieces, Vec::new())),
            _ => {}
        }
    }
    if let Ok(message) = decode::<Reply>(bytes) {
        match message.body {
            Reply::Ready { description, .. } => drop(DeviceDescription::try_from(description)),
            Reply::Refused(refusal) => drop(Refusal::try_from(refusal)),
            _ => {}
        }
    }
});
