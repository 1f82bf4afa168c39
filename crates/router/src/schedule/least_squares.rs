//! Learns a time as a linear formula, from the times that came: recursive least squares with forgetting (Ljung, System
//! Identification, 1999, 11.2). It minimises the relative error, because otherwise a few long times would decide all.

/// Forgetting factor: the weight of older observations after a new one. Half is forgotten after 700.
const KEPT: f64 = 0.999;
/// Initial variance of each coefficient.
const UNKNOWN: f64 = 1e6;
/// Calibrated from this many observations on,
const OBSERVATIONS_MIN: u64 = 50;
/// and while the mean relative error is no higher than this.
const ERROR_MAX: f64 = 0.5;
/// Weight of the newest observation in that mean.
const NEWEST: f64 = 0.02;
/// Times outside of this are ignored.
const SANE_MS: std::ops::RangeInclusive<f64> = 0.01..=3_600_000.0;
/// Errors are relative to at least this, or the shortest times would weigh most.
const SMALL_MS: f64 = 1.0;

/// A time as a sum of `TERMS` terms, each with a learned coefficient.
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
    /// Whether its predictions may be used: enough observations, and a small error.
    pub(super) fn is_calibrated(&self) -> bool {
        self.observations >= OBSERVATIONS_MIN && self.error <= ERROR_MAX
    }

    pub(super) fn observations(&self) -> u64 {
        self.observations
    }

    /// Mean relative error of recent predictions, each made before its time was observed.
    pub(super) fn error(&self) -> f64 {
        self.error
    }

    /// Milliseconds, at least 0.
    pub(super) fn predict(&self, terms: &[f64; TERMS]) -> f64 {
        self.value(terms).max(0.0)
    }

    fn value(&self, terms: &[f64; TERMS]) -> f64 {
        self.coefficients.iter().zip(terms).map(|(coefficient, term)| coefficient * term).sum()
    }

    /// Learns that these terms took this many milliseconds.
    pub(super) fn observe(&mut self, terms: &[f64; TERMS], took: f64) {
        if !SANE_MS.contains(&took) || terms.iter().any(|term| !term.is_finite()) {
            return;
        }
        let scale = took.max(SMALL_MS);
        let error = (took - self.predict(terms)).abs() / scale;
        // The first predictions have no meaning, so their errors do not count.
        if self.observations >= TERMS as u64 {
            let share = NEWEST.max(1.0 / (self.observations - TERMS as u64 + 1) as f64);
            self.error += share * (error.min(10.0) - self.error);
        }
        let terms = terms.map(|term| term / scale);
        let mut gain = [0.0; TERMS];
        for (row, gain) in self.covariance.iter().zip(&mut gain) {
            *gain = row.iter().zip(&terms).map(|(value, term)| value * term).sum();
        }
        let denominator: f64 = KEPT + gain.iter().zip(&terms).map(|(gain, term)| gain * term).sum::<f64>();
        let off = took / scale - self.value(&terms);
        let mut next = self.clone();
        for at in 0..TERMS {
            next.coefficients[at] += gain[at] / denominator * off;
            for other in 0..TERMS {
                let less = gain[at] * gain[other] / denominator;
                next.covariance[at][other] = (self.covariance[at][other] - less) / KEPT;
            }
            // Without this cap the variance of a term that does not vary would grow without bound.
            next.covariance[at][at] = next.covariance[at][at].min(UNKNOWN);
        }
        next.observations += 1;
        let is_sound =
            next.coefficients.iter().chain(next.covariance.iter().flatten()).all(|it| it.is_finite());
        *self = if is_sound { next } else { Self::default() };
    }
}
