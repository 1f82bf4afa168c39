//! Checks a tokenizer: whether the router counts as many tokens of a prompt as the engine does, by `usage.prompt_tokens` of its
//! answers.

/// Comparisons that are kept.
const WINDOW: u32 = 100;
/// Most of these that may differ: one in a hundred.
const DIFFERING_MAX: u32 = 1;
/// Comparisons that an agreement needs.
const ENOUGH: u32 = 3;

/// The last 100 comparisons with one node's counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Agreement {
    /// A bit a comparison, the newest lowest; set if the counts differed.
    differs: u128,
    compared: u32,
}

impl Agreement {
    /// Adds a comparison: the router counted `ours`, the engine `theirs`.
    pub fn compared(&mut self, ours: u64, theirs: u64) {
        self.differs = (self.differs << 1 | u128::from(ours != theirs)) & ((1 << WINDOW) - 1);
        self.compared = (self.compared + 1).min(WINDOW);
    }

    /// Whether more than one of a hundred differ.
    pub fn is_broken(&self) -> bool {
        self.differs.count_ones() > DIFFERING_MAX
    }

    /// Whether enough were compared, and at most one differs.
    pub fn holds(&self) -> bool {
        self.compared >= ENOUGH && !self.is_broken()
    }
}

/// `usage.prompt_tokens` of an answer in one piece: the last number with that name. It is searched for, because parsing answers
/// would cost too much.
pub(super) fn prompt_tokens(answer: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"\"prompt_tokens\":";
    let at = memchr::memmem::rfind(answer, NAME)? + NAME.len();
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
