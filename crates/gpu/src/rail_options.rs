//! The options of rails: links of other GPUs to the host that a load uses too.

use std::str::FromStr;
use std::time::Duration;

use crate::device::uuid_text;
use crate::driver::DeviceInfo;
use crate::error::GpuError;

/// The GPUs that serve as rails.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RailChoice {
    /// Loads use the link of their own GPU alone.
    Off,
    /// All GPUs that NVLink joins with the load's target.
    #[default]
    Auto,
    /// These, by ordinal or UUID, if kernels of the load's target reach their memory.
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
    /// The chosen ones among `devices`. An error if a named one is missing.
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

/// The options of [`crate::Rails`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailOptions {
    /// The GPUs that may serve as rails.
    pub choice: RailChoice,
    /// Bytes of a slot, a multiple of [`crate::plan::KERNEL_ALIGNMENT`].
    pub slot_bytes: u64,
    /// Slots of a staging ring: with two, one is filled while the other is read.
    pub slots: usize,
    /// Smaller loads use no rails.
    pub least_bytes: u64,
    /// How long a rank's load waits for the loads of other ranks that hold the same blocks, to share the links with them. The
    /// ranks of an engine start a step within a fraction of a millisecond. A load that is large enough to share takes longer
    /// than the wait for a missing rank.
    pub meet_within: Duration,
    /// Thread blocks of the kernel that reads a slot. Kernels of two processes take turns on a GPU, so fewer blocks would only
    /// keep the engine's kernels waiting for longer. Between H200s 16 read 369 GB/s in pieces of 64 KiB, 0.93 of a contiguous
    /// copy, and more read no more; copy engines read 104. An earlier kernel needed 48, with which rails were measured.
    pub blocks: u32,
    /// Whether loads of short pieces are staged through the target's staging ring.
    pub staging: bool,
    /// Pieces are short below this mean length. From 32 KiB on copy engines bring single pieces at most of the link's rate; at
    /// 16 KiB, on an H200, at 0.12 to 0.5 of it.
    pub stage_below: u64,
    /// The same for a load that uses rails too, because calls for single pieces delay the calls for the rails. 256 MiB in
    /// pieces of 64 KiB came over four H200s' links at 2.06 times the rate of one, and staged at 2.47.
    pub stage_beside_rails_below: u64,
}

/// Whether a load is staged: goes through the staging ring on its own GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Staging {
    /// Not staged.
    Off,
    /// Staged if it uses rails.
    BesideRails,
    /// Staged, with or without rails.
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
