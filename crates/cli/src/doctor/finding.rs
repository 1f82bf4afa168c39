//! What a check has to say.

use serde::{Deserialize, Serialize};

/// How much it matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// Nothing to do.
    Ok,
    /// kvlane works, but without something, or slower than it could.
    Note,
    /// `kvlane serve` does not start here, or serves nobody; or the engine that is asked about does without it.
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

/// One subject: what was found, what that means for kvlane, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) subject: String,
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
    /// Empty where there is nothing to say.
    pub(crate) means: String,
    /// Empty where there is nothing to do.
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
