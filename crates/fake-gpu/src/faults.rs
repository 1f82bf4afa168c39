//! Faults that tests inject into a fake.

/// An error for the n-th matching call, or for the n-th copy that runs.
#[derive(Debug)]
struct Fault {
    device: u32,
    /// None matches any call.
    operation: Option<&'static str>,
    /// Matching calls that still pass.
    passes: u64,
    code: u32,
}

/// Pending faults; each happens once.
#[derive(Debug, Default)]
pub(super) struct Faults {
    waiting: Vec<Fault>,
}

impl Faults {
    /// Fails the `nth` matching call from now; 1 is the next.
    pub(super) fn add(&mut self, device: u32, operation: Option<&'static str>, nth: u64, code: u32) {
        self.waiting.push(Fault { device, operation, passes: nth.saturating_sub(1), code });
    }

    /// Counts a call, and returns its error if it fails.
    pub(super) fn next(&mut self, device: u32, operation: &'static str) -> Option<u32> {
        let mut due = None;
        for (index, fault) in self.waiting.iter_mut().enumerate() {
            if fault.device != device || fault.operation.is_some_and(|wanted| wanted != operation) {
                continue;
            }
            if fault.passes > 0 {
                fault.passes -= 1;
            } else if due.is_none() {
                due = Some(index);
            }
        }
        due.map(|index| self.waiting.remove(index).code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_matching_call_fails_once() {
        let mut faults = Faults::default();
        faults.add(1, Some("copy"), 2, 700);
        faults.add(1, None, 4, 2);
        let calls = [(0, "copy"), (1, "copy"), (1, "alloc"), (1, "copy"), (1, "copy"), (1, "copy")];
        let outcomes = calls.map(|(device, operation)| faults.next(device, operation));
        assert_eq!(outcomes, [None, None, None, Some(700), Some(2), None]);
    }
}
