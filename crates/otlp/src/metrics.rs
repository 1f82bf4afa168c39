//! A program's table of metrics in the form of OTLP: the same names, labels and values as on its page for Prometheus.

use kvlane_door::{Distribution, Labels, Metric, MetricKind, Row, Source};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric as Proto, NumberDataPoint, Sum,
    metric, number_data_point,
};

use crate::span::{Value, attribute};

/// The metrics of a program at one moment.
#[derive(Debug, Default)]
pub struct Metrics(pub(crate) Vec<Proto>);

/// Reads a table. A metric without values is left out.
pub fn metrics_of<'t, S: 'static>(table: impl IntoIterator<Item = &'t Row<S>>, state: &S) -> Metrics {
    let read = |row: &Row<S>| {
        let data = match &row.source {
            Source::Total(value) => numbers(&row.metric, vec![(Labels::new(), value(state) as f64)]),
            Source::Each(values) => numbers(&row.metric, values(state)),
            Source::Distributions(values) => histograms(&row.metric, values(state)),
        };
        Some(Proto {
            name: row.metric.name.to_owned(),
            description: row.metric.help.to_owned(),
            data: Some(data?),
            ..Default::default()
        })
    };
    Metrics(table.into_iter().filter_map(read).collect())
}

impl Metrics {
    /// Adds those of another table.
    pub fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    /// Puts the times into each value: the start of the process, and now, in nanoseconds since 1970.
    pub(crate) fn at(mut self, start: u64, now: u64) -> Vec<Proto> {
        for metric in &mut self.0 {
            match &mut metric.data {
                Some(
                    metric::Data::Gauge(Gauge { data_points }) | metric::Data::Sum(Sum { data_points, .. }),
                ) => {
                    for point in data_points {
                        (point.start_time_unix_nano, point.time_unix_nano) = (start, now);
                    }
                }
                Some(metric::Data::Histogram(Histogram { data_points, .. })) => {
                    for point in data_points {
                        (point.start_time_unix_nano, point.time_unix_nano) = (start, now);
                    }
                }
                _ => {}
            }
        }
        self.0
    }
}

fn attributes(metric: &Metric, labels: Labels) -> Vec<opentelemetry_proto::tonic::common::v1::KeyValue> {
    let names = metric.labels.split(", ");
    names.zip(labels).map(|(name, value)| attribute(name, Value::Text(value))).collect()
}

fn numbers(metric: &Metric, values: Vec<(Labels, f64)>) -> Option<metric::Data> {
    let point = |(labels, value): (Labels, f64)| NumberDataPoint {
        attributes: attributes(metric, labels),
        value: Some(number_data_point::Value::AsDouble(value)),
        ..Default::default()
    };
    let data_points: Vec<_> = values.into_iter().map(point).collect();
    if data_points.is_empty() {
        return None;
    }
    Some(match metric.kind {
        MetricKind::Counter => metric::Data::Sum(Sum {
            data_points,
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
            is_monotonic: true,
        }),
        MetricKind::Gauge | MetricKind::Histogram => metric::Data::Gauge(Gauge { data_points }),
    })
}

fn histograms(metric: &Metric, values: Vec<(Labels, Distribution)>) -> Option<metric::Data> {
    let point = |(labels, distribution): (Labels, Distribution)| HistogramDataPoint {
        attributes: attributes(metric, labels),
        count: distribution.counts().iter().sum(),
        sum: Some(distribution.sum_seconds()),
        bucket_counts: distribution.counts().to_vec(),
        explicit_bounds: distribution.bounds_seconds().collect(),
        ..Default::default()
    };
    let data_points: Vec<_> = values.into_iter().map(point).collect();
    let temporality = AggregationTemporality::Cumulative.into();
    (!data_points.is_empty())
        .then_some(metric::Data::Histogram(Histogram { data_points, aggregation_temporality: temporality }))
}

#[cfg(test)]
mod tests {
    use kvlane_door::{distributions, each, total};

    use super::*;

    const BOUNDS: &[u64] = &[10_000, 100_000];
    const TABLE: &[Row<u64>] = &[
        total("a_total", MetricKind::Counter, "A.", |state| *state),
        each("b", MetricKind::Gauge, "role, node", "B.", |_| vec![(vec!["r".into(), "n".into()], 0.5)]),
        each("c", MetricKind::Gauge, "role", "C.", |_| Vec::new()),
        distributions("d_seconds", "", "D.", |_| {
            vec![(Vec::new(), Distribution::new(BOUNDS, vec![1, 2, 0], 0.25))]
        }),
    ];

    #[test]
    fn each_kind_has_its_form() {
        let metrics = metrics_of(TABLE, &7).at(1, 2);
        let names: Vec<_> = metrics.iter().map(|metric| metric.name.as_str()).collect();
        assert_eq!(names, ["a_total", "b", "d_seconds"], "one without values is left out");
        let Some(metric::Data::Sum(sum)) = &metrics[0].data else { panic!("a sum") };
        assert!(sum.is_monotonic && sum.data_points[0].time_unix_nano == 2);
        assert_eq!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(7.0)));
        let Some(metric::Data::Gauge(gauge)) = &metrics[1].data else { panic!("a gauge") };
        let keys: Vec<_> = gauge.data_points[0].attributes.iter().map(|each| each.key.as_str()).collect();
        assert_eq!(keys, ["role", "node"]);
        let Some(metric::Data::Histogram(histogram)) = &metrics[2].data else { panic!("a histogram") };
        let point = &histogram.data_points[0];
        assert_eq!((point.count, point.sum, point.start_time_unix_nano), (3, Some(0.25), 1));
        assert_eq!(
            (&point.explicit_bounds[..], &point.bucket_counts[..]),
            (&[0.01, 0.1][..], &[1, 2, 0][..])
        );
    }
}
