//! [`SsdPath`], [`PathStatus`]: whether a device's transfers go straight to and from the pool, or through staging memory, and why.
//! Pure.
//!
//! ```text
//!  --ssd-path direct, or the pool is on huge pages, or the page cache is used   -> direct
//!  --ssd-path staged                                                            -> staged
//!  auto: rates measured, or remembered beside the file                          -> the faster one
//!        nothing to measure with yet                                            -> staged, until 64 MiB are written
//! ```

use std::fmt;

/// Which way an operator wants transfers to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SsdPath {
    /// The faster one, as measured.
    #[default]
    Auto,
    /// Straight to and from the pool.
    Direct,
    /// Through staging memory on huge pages.
    Staged,
}

/// Which way transfers go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Direct,
    Staged,
}

/// Read rates of both ways, in bytes a second, checksums included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathRates {
    /// Into memory like the pool's.
    pub direct: u64,
    /// Into staging memory, and from there into memory like the pool's.
    pub staged: u64,
}

/// The way that a device's transfers go.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PathStatus {
    /// Whether they go through staging memory.
    pub staged: bool,
    /// Why, as a part of a sentence.
    pub reason: String,
    /// Both rates, if this start or an earlier one measured them.
    pub rates: Option<PathRates>,
    /// Bytes of staging memory. 0 if the device has none.
    pub staging_bytes: u64,
}

/// Facts from which a device chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Conditions {
    pub(crate) path: SsdPath,
    /// Whether there is staging memory, and most of it is on huge pages.
    pub(crate) staging: StagingState,
    /// Whether the pool is on huge pages.
    pub(crate) pool_is_huge: bool,
    /// Whether the page cache is bypassed.
    pub(crate) direct_io: bool,
    pub(crate) rates: Option<PathRates>,
}

/// State of the staging memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StagingState {
    /// Not needed, or the kernel refused it.
    None,
    /// The kernel gave ordinary pages.
    SmallPages,
    Huge,
}

/// A copy takes CPU time, so staging has to be this much faster.
const WORTH_A_COPY: f64 = 1.1;

impl Conditions {
    /// The way to go, the reason, and whether a measurement would settle it.
    pub(crate) fn choose(&self) -> (Way, String, bool) {
        let say = |way, reason: &str| (way, reason.to_owned(), false);
        match (self.path, self.staging) {
            (SsdPath::Direct, _) => say(Way::Direct, "--ssd-path direct"),
            (SsdPath::Staged, StagingState::None) => {
                say(Way::Direct, "--ssd-path staged, but there is no staging memory")
            }
            (SsdPath::Staged, _) => say(Way::Staged, "--ssd-path staged"),
            (SsdPath::Auto, _) if !self.direct_io => say(Way::Direct, "transfers go through the page cache"),
            (SsdPath::Auto, _) if self.pool_is_huge => say(Way::Direct, "the pool is on huge pages"),
            (SsdPath::Auto, StagingState::None) => say(Way::Direct, "there is no staging memory"),
            (SsdPath::Auto, StagingState::SmallPages) => {
                say(Way::Direct, "the kernel gave no huge pages for staging memory")
            }
            (SsdPath::Auto, StagingState::Huge) => match self.rates {
                None => {
                    let reason = "the pool is on small pages; not measured yet".to_owned();
                    (Way::Staged, reason, true)
                }
                Some(rates) if rates.staged as f64 > rates.direct as f64 * WORTH_A_COPY => {
                    say(Way::Staged, "it reads faster")
                }
                Some(_) => say(Way::Direct, "staging reads no faster"),
            },
        }
    }
}

impl fmt::Display for PathRates {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |rate: u64| rate as f64 / 1e9;
        write!(out, "direct {:.2} GB/s, staged {:.2} GB/s", gb(self.direct), gb(self.staged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto() -> Conditions {
        Conditions {
            path: SsdPath::Auto,
            staging: StagingState::Huge,
            pool_is_huge: false,
            direct_io: true,
            rates: None,
        }
    }

    #[test]
    fn what_an_operator_asks_for_comes_first() {
        let rates = Some(PathRates { direct: 1, staged: 100 });
        let direct = Conditions { path: SsdPath::Direct, rates, ..auto() };
        assert_eq!(direct.choose().0, Way::Direct);
        let staged = Conditions { path: SsdPath::Staged, pool_is_huge: true, direct_io: false, ..auto() };
        assert_eq!(staged.choose().0, Way::Staged);
        let refused = Conditions { staging: StagingState::None, ..staged };
        assert_eq!(refused.choose().0, Way::Direct);
    }

    #[test]
    fn staging_has_to_pay_for_its_copy() {
        let with =
            |direct, staged| Conditions { rates: Some(PathRates { direct, staged }), ..auto() }.choose();
        assert_eq!(with(1_000, 1_101).0, Way::Staged);
        assert_eq!(with(1_000, 1_099).0, Way::Direct);
        assert!(!with(1_000, 1_099).2);
    }

    #[test]
    fn only_auto_with_huge_staging_asks_for_a_measurement() {
        assert_eq!((auto().choose().0, auto().choose().2), (Way::Staged, true));
        for other in [
            Conditions { pool_is_huge: true, ..auto() },
            Conditions { direct_io: false, ..auto() },
            Conditions { staging: StagingState::SmallPages, ..auto() },
            Conditions { staging: StagingState::None, ..auto() },
        ] {
            assert_eq!((other.choose().0, other.choose().2), (Way::Direct, false), "{other:?}");
        }
    }
}
