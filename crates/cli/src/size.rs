//! Sizes as people write them.

use std::{fmt, str::FromStr};

use bytesize::ByteSize;
use serde::{Deserialize, Deserializer, de};

/// Bytes: `4gb` (10^9), `4gib` (2^30), kb to tb, kib to tib, or a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ').trim();
        let unit = text[digits.len()..].trim().to_ascii_lowercase();
        const UNITS: [&str; 10] = ["", "b", "kb", "mb", "gb", "tb", "kib", "mib", "gib", "tib"];
        if !UNITS.contains(&unit.as_str()) {
            return Err(format!(
                "'{text}' has the unknown unit '{unit}': use kb, mb, gb, tb, kib, mib, gib, tib or plain bytes"
            ));
        }
        if digits.is_empty() || digits.parse::<f64>().is_ok_and(|n| !n.is_finite() || n < 0.0) {
            return Err(format!("'{text}' is no size: write for example 4gb, 512mib or 1073741824"));
        }
        let size = format!("{digits}{unit}")
            .parse::<ByteSize>()
            .map_err(|_| format!("'{text}' is no size: write for example 4gb, 512mib or 1073741824"))?;
        Ok(Self(size.as_u64()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", ByteSize::b(self.0).display().si())
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => Ok(Self(bytes)),
            Written::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_decimal_or_binary_as_written() {
        for (text, bytes) in [
            ("4gb", 4_000_000_000),
            ("4GiB", 4 << 30),
            ("1.5 mib", 3 << 19),
            ("2kb", 2000),
            ("1tb", 1_000_000_000_000),
            ("4096", 4096),
        ] {
            assert_eq!(text.parse::<Size>().unwrap().0, bytes, "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_value() {
        for text in ["4xb", "gb", "", "4 gigs", "-1gb", "nangb", "1e400", "4g b"] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.contains(&format!("'{text}'")), "{text}: {error}");
        }
    }
}
