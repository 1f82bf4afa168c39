//! What a time depends on, learned from times that came: recursive least squares with forgetting (Ljung, System Identification,
//! 1999, 11.2), of the relative error: else a few long times would decide all.

/// Of what was learned before an observation, so much counts after it: half of it is forgotten after 700.
const KEPT: f64 = 0.999;
/// How little is known at the beginning.
const UNKNOWN: f64 = 1e6;
/// With fewer observations nothing is predicted.
const OBSERVATIONS_MIN: u64 = 50;
/// Nor while the mean relative error is more.
const ERROR_MAX: f64 = 0.5;
/// Share of the newest observation in that mean.
const NEWEST: f64 = 0.02;
/// Times that are less or more than this say nothing.
const SANE_MS: std::ops::RangeInclusive<f64> = 0.01..=3_600_000.0;
/// Errors count as relative to no less than this.
const SMALL_MS: f64 = 1.0;

/// A time as a sum of so many terms, each with a coefficient.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LeastSquares<const TERMS: usize> {
    pub(super) coefficients: [f64; TERMS],
    covariance: [[f64; TERMS]; TERMS],
    observations: u64,
    error: f64,
}

impl<const TERMS: usize> Default for LeastSquares<TERMS> {
    fn default() -> Self {
        let mut covariance = [[0.0; TERMS]; TERMS];
        (0..TERMS).for_each(|at| covariance[at][at] = UNKNOWN);
        Self { coefficients: [0.0; TERMS], covariance, observations: 0, error: 0.0 }
    }
}

impl<const TERMS: usize> LeastSquares<TERMS> {
    /// Whether it has seen enough to be right.
    pub(super) fn is_calibrated(&self) -> bool {
        self.observations >= OBSERVATIONS_MIN && self.error <= ERROR_MAX
    }

    pub(super) fn observations(&self) -> u64 {
        self.observations
    }

    /// Mean of the last relative errors, each of what was predicted before the time came.
    pub(super) fn error(&self) -> f64 {
        self.error
    }

    /// Milliseconds; 0 where the formula says less.
    pub(super) fn predict(&self, terms: &[f64; TERMS]) -> f64 {
        self.value(terms).max(0.0)
    }

    fn value(&self, terms: &[f64; TERMS]) -> f64 {
        self.coefficients.iter().zip(terms).map(|(coefficient, term)| coefficient * term).sum()
    }

    /// It took so many milliseconds.
    pub(super) fn observe(&mut self, terms: &[f64; TERMS], took: f64) {
        if !SANE_MS.contains(&took) || terms.iter().any(|term| !term.is_finite()) {
            return;
        }
        let scale = took.max(SMALL_MS);
        let error = (took - self.predict(terms)).abs() / scale;
        // The first ones are predicted by nothing.
        if self.observations >= TERMS as u64 {
            let share = NEWEST.max(1.0 / (self.observations - TERMS as u64 + 1) as f64);
            self.error += share * (error.min(10.0) - self.error);
        }
        let terms = terms.map(|term| term / scale);
        let mut gain = [0.0; TERMS];
        for (row, gain) in self.covariance.iter().zip(&mut gain) {
            *gain = row.iter().zip(&terms).map(|(value, term)| value * term).sum();
        }
        let known: f64 = KEPT + gain.iter().zip(&terms).map(|(gain, term)| gain * term).sum::<f64>();
        let off = took / scale - self.value(&terms);
        let mut next = self.clone();
        for at in 0..TERMS {
            next.coefficients[at] += gain[at] / known * off;
            for other in 0..TERMS {
                let less = gain[at] * gain[other] / known;
                next.covariance[at][other] = (self.covariance[at][other] - less) / KEPT;
            }
            // What does not vary for long would be taken for unknown without end.
            next.covariance[at][at] = next.covariance[at][at].min(UNKNOWN);
        }
        next.observations += 1;
        let is_sound =
            next.coefficients.iter().chain(next.covariance.iter().flatten()).all(|it| it.is_finite());
        *self = if is_sound { next } else { Self::default() };
    }
}
