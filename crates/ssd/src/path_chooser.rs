//! [`PathChooser`]: makes the staging memory of a device, has both ways measured, and says which one transfers take.

use std::ops::Range;

use kvlane_memory::available_memory;

use crate::io::{Io, Piece};
use crate::measure::{Measured, Scratch, measure};
use crate::staging::Staging;
use crate::way::{Conditions, PathStatus, SsdPath, StagingState, Way};
use crate::way_file::RatesFile;

/// Memory that stays free beside the staging memory: the scratch, and what the daemon takes later.
const LEFT_FREE: u64 = 64 << 20;

/// Chooses for one device. Dropped after the device's `Io`, because the kernel may still write to `scratch` and `hanging`.
pub(crate) struct PathChooser {
    conditions: Conditions,
    rates_file: RatesFile,
    staging_bytes: u64,
    way: Way,
    reason: String,
    wants_rates: bool,
    /// Memory for the measurement, if there is to be one. It stays afterwards, because it is registered with io_uring.
    scratch: Option<Scratch>,
    /// Staging memory of a measurement whose operations did not end in time.
    hanging: Option<Staging>,
}

impl PathChooser {
    pub(crate) fn new(
        path: SsdPath,
        pool_is_huge: bool,
        direct_io: bool,
        rates_file: RatesFile,
    ) -> PathChooser {
        let rates = if path == SsdPath::Auto { rates_file.read() } else { None };
        let conditions = Conditions { path, staging: StagingState::None, pool_is_huge, direct_io, rates };
        let mut chooser = PathChooser {
            conditions,
            rates_file,
            staging_bytes: 0,
            way: Way::Direct,
            reason: String::new(),
            wants_rates: false,
            scratch: None,
            hanging: None,
        };
        chooser.choose();
        chooser
    }

    /// Makes staging memory if it may be of use. The second value is a note for the operator.
    pub(crate) fn make_staging(&mut self, bytes: u64) -> (Option<Staging>, Option<String>) {
        let if_huge = Conditions { staging: StagingState::Huge, ..self.conditions };
        let (way, reason, _) = if_huge.choose();
        if way == Way::Direct {
            self.reason = reason;
            return (None, None);
        }
        if available_memory().is_some_and(|available| available < bytes.saturating_add(LEFT_FREE)) {
            let note = format!(
                "no staging memory, transfers go straight to the pool: fewer than {} bytes are free",
                bytes.saturating_add(LEFT_FREE)
            );
            return (None, Some(note));
        }
        let made = usize::try_from(bytes).map_err(std::io::Error::other).and_then(Staging::new);
        let (staging, note) = match made {
            Ok(staging) if staging.is_huge() => {
                self.conditions.staging = StagingState::Huge;
                (Some(staging), None)
            }
            Ok(staging) => {
                self.conditions.staging = StagingState::SmallPages;
                let note = "no huge pages for staging memory: transparent_hugepage/enabled may be never";
                // Only an operator who asked for it gets staging that is no faster.
                (Some(staging).filter(|_| self.conditions.path == SsdPath::Staged), Some(note.to_owned()))
            }
            Err(error) => {
                (None, Some(format!("no staging memory, transfers go straight to the pool: {error}")))
            }
        };
        self.staging_bytes = staging.as_ref().map_or(0, Staging::bytes);
        self.choose();
        if self.wants_rates {
            match Scratch::new() {
                Ok(scratch) => self.scratch = Some(scratch),
                Err(error) => self.not_measured(&error.to_string()),
            }
        }
        (staging, note)
    }

    /// Memory of the measurement, to be registered with io_uring.
    pub(crate) fn scratch_memory(&mut self) -> Option<Piece> {
        self.scratch.as_mut().map(Scratch::memory)
    }

    fn not_measured(&mut self, why: &str) {
        self.wants_rates = false;
        self.reason = format!("not measured: {why}");
    }

    fn choose(&mut self) {
        (self.way, self.reason, self.wants_rates) = self.conditions.choose();
    }

    /// The way that the next transfers take.
    pub(crate) fn way(&self) -> Way {
        self.way
    }

    /// Whether a measurement would settle the choice.
    pub(crate) fn wants_rates(&self) -> bool {
        self.wants_rates
    }

    pub(crate) fn status(&self) -> PathStatus {
        PathStatus {
            staged: self.way == Way::Staged,
            reason: self.reason.clone(),
            rates: self.conditions.rates,
            staging_bytes: self.staging_bytes,
        }
    }

    /// Measures both ways by reads from these ranges of the file, and chooses. Nothing else may be in flight.
    pub(crate) fn measure(
        &mut self,
        io: &mut dyn Io,
        staging: &mut Option<Staging>,
        ranges: &[Range<u64>],
        next_id: &mut dyn FnMut() -> u64,
    ) {
        self.wants_rates = false;
        let (Some(memory), Some(scratch)) = (staging.as_mut(), self.scratch.as_mut()) else { return };
        match measure(io, memory, scratch, ranges, next_id) {
            Measured::Rates(rates) => {
                self.conditions.rates = Some(rates);
                self.choose();
                self.rates_file.write(rates);
            }
            Measured::Nothing(why) => self.not_measured(why),
            Measured::Hangs => {
                self.hanging = staging.take();
                self.staging_bytes = 0;
                self.conditions.staging = StagingState::None;
                self.choose();
                self.reason = "the device did not end its reads within a second".to_owned();
            }
        }
    }
}
