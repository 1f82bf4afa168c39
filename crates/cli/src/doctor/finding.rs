//! [`Finding`]: the result of a check.

use serde::{Deserialize, Serialize};

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// The subject is in order.
    Ok,
    /// kvlane works without something, or slower than it could.
    Note,
    /// `kvlane serve` does not start here or serves no engine, or the engine of `--engine-config` runs without kvlane.
    Problem,
}

impl Verdict {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

/// One subject: the facts, their meaning for kvlane, and advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) subject: String,
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
    /// Empty if the facts say it all.
    pub(crate) means: String,
    /// Empty if there is nothing to do.
    pub(crate) advice: String,
}

impl Finding {
    pub(crate) fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(Verdict::Ok, subject, found)
    }

    pub(crate) fn note(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(Verdict::Note, subject, found)
    }

    pub(crate) fn problem(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(Verdict::Problem, subject, found)
    }

    pub(crate) fn means(self, means: impl Into<String>) -> Self {
        Self { means: means.into(), ..self }
    }

    pub(crate) fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: advice.into(), ..self }
    }

    fn new(verdict: Verdict, subject: impl Into<String>, found: impl Into<String>) -> Self {
        let (subject, found) = (subject.into(), found.into());
        Self { subject, verdict, found, means: String::new(), advice: String::new() }
    }
}
