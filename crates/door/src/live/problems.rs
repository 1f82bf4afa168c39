//! [`Problems`]: what an operator should look at, in plain words.

use serde_json::{Value, json};

/// How much a problem matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Requests fail, or bytes are damaged.
    Critical,
    /// Something costs hits or work.
    Warning,
    /// Worth knowing, and costs nothing yet.
    Info,
}

/// The problems of a program at one moment, the worst first.
#[derive(Debug, Default)]
pub struct Problems(Vec<Value>);

impl Problems {
    /// Adds a problem, if it is there, and what to do about it.
    pub fn add(&mut self, is_there: bool, severity: Severity, text: String, action: &str) {
        if is_there {
            let severity = match severity {
                Severity::Critical => "critical",
                Severity::Warning => "warning",
                Severity::Info => "info",
            };
            self.0.push(json!({ "severity": severity, "text": text, "action": action }));
        }
    }

    /// As the page shows them.
    pub fn into_json(self) -> Value {
        self.0.into()
    }
}
