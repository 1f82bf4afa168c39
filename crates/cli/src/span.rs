//! Spans of time as people write them.

use std::{str::FromStr, time::Duration};

/// A span of time: `90s`, `10m`, `1h`, `2d`, or a plain number of seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

const EXAMPLES: &str = "write for example 90s, 10m, 1h or 2d";
/// Longer than this is a mistake.
const LONGEST_S: f64 = 366.0 * 86_400.0;

impl FromStr for Span {
    /// The mistake. clap's message adds the text and the flag.
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (number, unit) =
            text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
        let factor = match unit.to_ascii_lowercase().as_str() {
            "" | "s" | "sec" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return Err(EXAMPLES.into()),
        };
        let seconds = number.trim().parse::<f64>().map_err(|_| EXAMPLES)? * factor;
        if !(seconds > 0.0 && seconds <= LONGEST_S) {
            return Err(format!("it must be more than 0 and at most a year: {EXAMPLES}"));
        }
        Ok(Self(Duration::from_secs_f64(seconds)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_known() {
        for (text, seconds) in
            [("90s", 90.0), ("1.5m", 90.0), ("1h", 3600.0), ("2 d", 172_800.0), ("0.5", 0.5)]
        {
            assert_eq!(text.parse(), Ok(Span(Duration::from_secs_f64(seconds))));
        }
    }

    #[test]
    fn mistakes_say_what_to_write() {
        for text in ["-1", "0", "", "h", "1w", "1h30m", "nan", "inf", "9999999h"] {
            assert!(text.parse::<Span>().unwrap_err().contains("write for example 90s"), "{text}");
        }
    }
}
