//! How a process uses rails: the links of other GPUs to the host.

use std::str::FromStr;
use std::time::Duration;

use crate::device::uuid_text;
use crate::driver::DeviceInfo;
use crate::error::GpuError;

/// Which GPUs lend their links.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RailChoice {
    /// None.
    Off,
    /// All that NVLink joins with the GPU that is loaded.
    #[default]
    Auto,
    /// These, by ordinal or UUID, where kernels of the GPU that is loaded reach their memory.
    List(Vec<String>),
}

impl FromStr for RailChoice {
    type Err = GpuError;

    /// `auto`, `off`, or ordinals and UUIDs with commas between them.
    fn from_str(text: &str) -> Result<RailChoice, GpuError> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        let is_name = |name: &String| name.starts_with("GPU-") || name.parse::<u32>().is_ok();
        match text {
            "auto" => Ok(RailChoice::Auto),
            "off" => Ok(RailChoice::Off),
            _ if names.iter().all(is_name) => Ok(RailChoice::List(names)),
            _ => Err(GpuError::Invalid(format!(
                "'{text}' is neither auto, off, nor a list of GPUs such as 1,2"
            ))),
        }
    }
}

impl RailChoice {
    /// Those of the devices that are chosen; an error where one is named that is not there.
    pub fn among(&self, devices: Vec<DeviceInfo>) -> Result<Vec<DeviceInfo>, GpuError> {
        let names = match self {
            RailChoice::Off => return Ok(Vec::new()),
            RailChoice::Auto => return Ok(devices),
            RailChoice::List(names) => names,
        };
        let is = |device: &DeviceInfo, name: &String| {
            name.parse() == Ok(device.ordinal) || *name == uuid_text(device.uuid)
        };
        match names.iter().find(|name| !devices.iter().any(|device| is(device, name))) {
            Some(unknown) => Err(GpuError::NoSuchDevice(unknown.clone())),
            None => {
                let named = |device: &DeviceInfo| names.iter().any(|name| is(device, name));
                Ok(devices.into_iter().filter(named).collect())
            }
        }
    }
}

/// How rails are used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailOptions {
    /// Which GPUs may lend their links.
    pub choice: RailChoice,
    /// Bytes of a slot, a multiple of [`crate::plan::KERNEL_ALIGNMENT`].
    pub slot_bytes: u64,
    /// Slots of a ring: with two, one is filled while the other is read.
    pub slots: usize,
    /// Smaller loads use no rails.
    pub least_bytes: u64,
    /// How long the load of one of several ranks that hold the same blocks waits for the others' loads, to share the links
    /// with them. The ranks of an engine start a step within a fraction of a millisecond of each other; a load that is
    /// large enough for this takes longer than what a missing rank costs.
    pub meet_within: Duration,
    /// Thread blocks of the kernel that reads a slot. Kernels of two processes take turns on a GPU, so that few blocks would
    /// only keep the engine's kernels waiting for longer: between H200s 48 read 0.85 of what a contiguous copy moves, 16
    /// read 0.73, more than 48 no more.
    pub blocks: u32,
    /// Whether loads of short pieces go through a ring on the target itself.
    pub staging: bool,
    /// Pieces that are shorter than this on average are short. From 32 KiB on copy engines bring each piece for itself at
    /// most of the link's rate; of 16 KiB, on an H200, at 0.12 to 0.5 of it.
    pub stage_below: u64,
    /// The same for a load that uses rails too. The calls for single pieces keep the rails waiting for theirs: 256 MiB in
    /// pieces of 64 KiB came over four H200s' links at 2.06 times the rate of one, staged at 2.47.
    pub stage_beside_rails_below: u64,
}

/// Which loads go through a ring on the GPU that they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Staging {
    /// Not this one.
    Off,
    /// This one if it uses rails.
    BesideRails,
    /// This one.
    On,
}

impl Default for RailOptions {
    fn default() -> RailOptions {
        RailOptions {
            choice: RailChoice::Auto,
            slot_bytes: 8 << 20,
            slots: 8,
            least_bytes: 32 << 20,
            meet_within: Duration::from_millis(5),
            blocks: 48,
            staging: true,
            stage_below: 32 << 10,
            stage_beside_rails_below: 128 << 10,
        }
    }
}
