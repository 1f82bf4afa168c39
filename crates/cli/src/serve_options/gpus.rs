//! The flags of `kvlane serve` about GPUs.

use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use clap::ValueEnum;
use kvlane_gpu::{Driver, Drivers, RailChoice, RailOptions};
use serde::Deserialize;

const DEFAULT_RAILS: &str = "off";
const DEFAULT_SAVE_LINK_SHARE: u8 = 33;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum GpuArg {
    Auto,
    On,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum CalibrateArg {
    Auto,
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum StagingArg {
    Auto,
    Off,
}

/// The flags that the user gave.
#[derive(Debug)]
pub(super) struct GpuFlags {
    pub(super) gpu: Option<GpuArg>,
    pub(super) rails: Option<String>,
    pub(super) staging: Option<StagingArg>,
    pub(super) calibrate: Option<CalibrateArg>,
    /// In percent, as the user gave it.
    pub(super) save_link_share: Option<u8>,
}

/// The daemon's settings of GPUs, complete and checked.
#[derive(Debug)]
pub(super) struct GpuOptions {
    pub(super) driver: Option<Arc<dyn Driver>>,
    /// Why engines on GPUs are not served; empty if they are.
    pub(super) none: String,
    pub(super) rails: RailOptions,
    pub(super) calibrate: bool,
    /// A fraction, 0 to 1.
    pub(super) save_link_share: f64,
}

impl GpuFlags {
    /// Looks for GPUs through these drivers. Adds a warning for each flag that has no effect on this machine.
    pub(super) fn resolve(self, drivers: Drivers, warnings: &mut Vec<String>) -> Result<GpuOptions> {
        let (driver, none) = match self.gpu.unwrap_or(GpuArg::Auto) {
            GpuArg::Off => (None, "--gpu off".to_owned()),
            wanted => match kvlane_gpu::detect(drivers) {
                Ok(driver) => (Some(driver), String::new()),
                Err(reason) if wanted == GpuArg::On => bail!("--gpu on: {reason}"),
                Err(reason) => (None, reason.to_string()),
            },
        };
        let rails_text = self.rails.as_deref().unwrap_or(DEFAULT_RAILS);
        let rails: RailChoice = rails_text.parse().map_err(|error| anyhow!("--rails {error}"))?;
        match &driver {
            Some(driver) => {
                let devices = driver.devices()?;
                let count = devices.len();
                rails.among(devices).map_err(|error| anyhow!("--rails '{rails_text}': {error}"))?;
                if count < 2 && rails != RailChoice::Off {
                    warnings.push(format!(
                        "--rails {rails_text} has no effect: there is one GPU, so no other one can lend its link"
                    ));
                }
            }
            None => {
                let asked = [
                    (rails != RailChoice::Off).then(|| format!("--rails {rails_text}")),
                    (self.staging == Some(StagingArg::Auto)).then(|| "--staging auto".into()),
                    (self.calibrate == Some(CalibrateArg::Auto)).then(|| "--calibrate auto".into()),
                    self.save_link_share.map(|share| format!("--save-link-share {share}")),
                ];
                let without = |flag| format!("{flag} has no effect: no GPU is used ({none})");
                warnings.extend(asked.into_iter().flatten().map(without));
            }
        }
        let is_calibrated = self.calibrate != Some(CalibrateArg::Off);
        let share = self.save_link_share.unwrap_or(DEFAULT_SAVE_LINK_SHARE);
        if !(1..=100).contains(&share) {
            bail!("--save-link-share {share} is not a percentage from 1 to 100");
        }
        let staging = self.staging != Some(StagingArg::Off);
        Ok(GpuOptions {
            calibrate: is_calibrated && driver.as_ref().is_some_and(|driver| driver.name() == "cuda"),
            driver,
            none,
            rails: RailOptions { choice: rails, staging, ..RailOptions::default() },
            save_link_share: f64::from(share) / 100.0,
        })
    }
}
