//! Whether our count of a prompt's tokens is the engine's: `usage.prompt_tokens` of its answers.

/// Comparisons that count.
const WINDOW: u32 = 100;
/// Of them, how many may differ: one in a hundred.
const DIFFERING_MAX: u32 = 1;
/// Comparisons that it takes to say that both agree.
const ENOUGH: u32 = 3;

/// The last 100 comparisons.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Agreement {
    /// A bit each, the newest lowest: set where the counts differ.
    differs: u128,
    compared: u32,
}

impl Agreement {
    /// The engine counted `theirs` where we counted `ours`.
    pub fn compared(&mut self, ours: u64, theirs: u64) {
        self.differs = (self.differs << 1 | u128::from(ours != theirs)) & ((1 << WINDOW) - 1);
        self.compared = (self.compared + 1).min(WINDOW);
    }

    /// More than one of a hundred differ.
    pub fn is_broken(&self) -> bool {
        self.differs.count_ones() > DIFFERING_MAX
    }

    /// Enough were compared, and they are the same.
    pub fn holds(&self) -> bool {
        self.compared >= ENOUGH && !self.is_broken()
    }
}

/// `usage.prompt_tokens` of an answer in one piece: the last number of that name. Answers are not parsed for it.
pub(super) fn prompt_tokens(answer: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"\"prompt_tokens\":";
    let at = answer.windows(NAME.len()).rposition(|window| window == NAME)? + NAME.len();
    let rest = answer[at..].trim_ascii_start();
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_of_a_hundred_are_too_many() {
        let mut agreement = Agreement::default();
        assert!(!agreement.holds());
        for _ in 0..3 {
            agreement.compared(5, 5);
        }
        agreement.compared(5, 6);
        assert!(agreement.holds() && !agreement.is_broken());
        agreement.compared(5, 6);
        assert!(!agreement.holds() && agreement.is_broken());
        for _ in 0..98 {
            agreement.compared(5, 5);
            assert!(agreement.is_broken());
        }
        agreement.compared(5, 5);
        assert!(agreement.holds());
    }

    #[test]
    fn an_answer_says_how_many_tokens_its_prompt_had() {
        let answer = br#"{"choices":[{"text":"\"prompt_tokens\": 9"}],"usage":{"prompt_tokens": 12,"total_tokens":13}}"#;
        assert_eq!(prompt_tokens(answer), Some(12));
        for wrong in
            [&b"{}"[..], b"", b"{\"prompt_tokens\":", b"{\"prompt_tokens\": 12", b"{\"prompt_tokens\":null}"]
        {
            assert_eq!(prompt_tokens(wrong), None);
        }
    }
}
