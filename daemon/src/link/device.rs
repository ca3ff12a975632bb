//! What a device process says of its device.

use serde::{Deserialize, Serialize};
use statecopy_kernels::device::{DeviceDescription, Footprint};
use statecopy_kernels::signature::DeviceUuid;
use statecopy_proto::DataType;

use super::LinkError;

/// A [`DeviceDescription`] on the link.
#[derive(Debug, Serialize, Deserialize)]
pub struct DescriptionMessage {
    kind: String,
    uuid: [u8; 16],
    name: String,
    family: Option<String>,
    fused: Vec<u32>,
}

impl From<&DeviceDescription> for DescriptionMessage {
    fn from(description: &DeviceDescription) -> Self {
        Self {
            kind: description.kind.to_owned(),
            uuid: description.uuid.0,
            name: description.name.clone(),
            family: description.family.clone(),
            fused: description.fused.iter().map(|dtype| dtype.number()).collect(),
        }
    }
}

impl TryFrom<DescriptionMessage> for DeviceDescription {
    type Error = LinkError;

    fn try_from(description: DescriptionMessage) -> Result<Self, LinkError> {
        let fused: Result<Vec<_>, _> =
            description.fused.into_iter().map(DataType::try_from).collect();
        let kind = ["host", "cuda", "ascend"]
            .into_iter()
            .find(|kind| *kind == description.kind)
            .ok_or(LinkError::OutOfTurn("a device of an unknown kind"))?;
        Ok(Self {
            kind,
            uuid: DeviceUuid(description.uuid),
            name: description.name,
            family: description.family,
            fused: fused?,
        })
    }
}

/// A [`Footprint`] on the link.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct FootprintMessage {
    context: u64,
    tables: u64,
    words: u64,
}

impl From<Footprint> for FootprintMessage {
    fn from(footprint: Footprint) -> Self {
        let Footprint { context, tables, words } = footprint;
        Self { context, tables, words }
    }
}

impl From<FootprintMessage> for Footprint {
    fn from(footprint: FootprintMessage) -> Self {
        let FootprintMessage { context, tables, words } = footprint;
        Self { context, tables, words }
    }
}
