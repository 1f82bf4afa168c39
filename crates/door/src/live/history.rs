//! [`History`]: the samples of the last ten minutes, one a second, and [`Rates`], which makes them from counters.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde_json::{Value, json};

/// Samples that are kept: ten minutes, at one a second.
pub const SAMPLES_MAX: usize = 600;

/// Samples of a few series, one a second. Takes 4 bytes for each sample of a series.
#[derive(Debug)]
pub struct History {
    names: &'static [&'static str],
    samples: Mutex<Samples>,
}

#[derive(Debug, Default)]
struct Samples {
    rows: VecDeque<Box<[f32]>>,
    /// The number of the next sample, counted from 0.
    next: u64,
}

impl History {
    /// No samples yet. A sample has a number for each of these names.
    pub fn new(names: &'static [&'static str]) -> Self {
        Self { names, samples: Mutex::default() }
    }

    /// Adds a sample, and drops the oldest one if there are too many. A number that is not finite is kept as "none".
    ///
    /// # Panics
    /// If the sample has another number of values than there are names.
    pub fn push(&self, sample: &[f64]) {
        assert_eq!(sample.len(), self.names.len(), "a value for each series");
        let mut samples = self.samples.lock();
        if samples.rows.len() == SAMPLES_MAX {
            samples.rows.pop_front();
        }
        samples.rows.push_back(sample.iter().map(|value| *value as f32).collect());
        samples.next += 1;
    }

    /// The sum of a series: of a rate a second, about what happened in the last ten minutes.
    ///
    /// # Panics
    /// If there is no series of this name.
    pub fn sum(&self, name: &str) -> f64 {
        let at = self.names.iter().position(|known| *known == name);
        assert!(at.is_some(), "no series {name}");
        let at = at.unwrap_or_default();
        self.samples.lock().rows.iter().map(|row| f64::from(row[at])).filter(|value| value.is_finite()).sum()
    }

    /// The samples from number `after` on, as JSON: `first` is the number of the first one, `next` that of the next one to
    /// come, and `series` has a list for each name. All samples, if `after` is not a number that was given out.
    pub fn read(&self, after: u64) -> Value {
        let samples = self.samples.lock();
        let oldest = samples.next - samples.rows.len() as u64;
        let first = if (oldest..=samples.next).contains(&after) { after } else { oldest };
        let skipped = (first - oldest) as usize;
        let column = |(at, name): (usize, &&str)| {
            let values: Vec<Value> = samples.rows.iter().skip(skipped).map(|row| short(row[at])).collect();
            ((*name).to_owned(), Value::from(values))
        };
        let series: serde_json::Map<String, Value> = self.names.iter().enumerate().map(column).collect();
        json!({ "first": first, "next": samples.next, "series": series })
    }
}

/// A number of four figures, which is what a small chart can show; null if it is not finite.
fn short(value: f32) -> Value {
    if value == 0.0 || !value.is_finite() {
        return if value == 0.0 { 0.into() } else { Value::Null };
    }
    let unit = 10f64.powi(3 - f64::from(value.abs()).log10().floor() as i32);
    let rounded = (f64::from(value) * unit).round() / unit;
    if rounded.fract() == 0.0 && rounded.abs() < 1e15 { (rounded as i64).into() } else { rounded.into() }
}

/// Turns counters into rates a second, by the time that has really passed.
#[derive(Debug)]
pub struct Rates<const COUNTERS: usize> {
    before: Option<(Instant, [u64; COUNTERS])>,
}

impl<const COUNTERS: usize> Default for Rates<COUNTERS> {
    fn default() -> Self {
        Self { before: None }
    }
}

impl<const COUNTERS: usize> Rates<COUNTERS> {
    /// The rates since the last call; 0 for the first one, and where a counter has gone back.
    pub fn since_last(&mut self, counters: [u64; COUNTERS], now: Instant) -> [f64; COUNTERS] {
        let Some((at, before)) = self.before.replace((now, counters)) else { return [0.0; COUNTERS] };
        let seconds = now.saturating_duration_since(at).max(Duration::from_millis(1)).as_secs_f64();
        std::array::from_fn(|each| counters[each].saturating_sub(before[each]) as f64 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_each_sample_once() {
        let history = History::new(&["a", "b"]);
        assert_eq!(history.read(0), json!({ "first": 0, "next": 0, "series": { "a": [], "b": [] } }));
        history.push(&[1.0, f64::NAN]);
        history.push(&[1234.567, 0.000_123_456]);
        assert_eq!(
            history.read(0),
            json!({ "first": 0, "next": 2, "series": { "a": [1, 1235], "b": [null, 0.000_123_5] } })
        );
        assert_eq!(history.read(2), json!({ "first": 2, "next": 2, "series": { "a": [], "b": [] } }));
        assert_eq!(history.read(3)["first"], 0, "the program was restarted");
        assert!((history.sum("a") - 1235.567).abs() < 0.001 && history.sum("b") < 0.001);
    }

    #[test]
    fn ten_minutes_are_kept() {
        let history = History::new(&["a"]);
        (0..SAMPLES_MAX + 5).for_each(|second| history.push(&[second as f64]));
        let read = history.read(2);
        assert_eq!((&read["first"], read["series"]["a"].as_array().map(Vec::len)), (&json!(5), Some(600)));
        assert_eq!(read["series"]["a"][0], 5);
        assert_eq!(history.read(604)["series"]["a"], json!([604]));
    }

    #[test]
    fn rates_are_those_of_the_time_that_passed() {
        let (mut rates, start) = (Rates::default(), Instant::now());
        assert_eq!(rates.since_last([5, 100], start), [0.0, 0.0]);
        assert_eq!(rates.since_last([25, 90], start + Duration::from_secs(2)), [10.0, 0.0]);
        assert_eq!(rates.since_last([26, 91], start + Duration::from_secs(2)), [1000.0, 1000.0]);
    }
}
