//! Writes the page that Prometheus scrapes, in its text format, version 0.0.4.

use std::fmt::Write;

use super::{
    histogram::Distribution,
    table::{Labels, Metric, Row, Source},
};

/// HTTP content type of the page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4";

/// Appends the metrics of a table, read from the program's state. A metric without values is left out.
pub fn write_metrics<'t, S: 'static>(
    page: &mut String,
    table: impl IntoIterator<Item = &'t Row<S>>,
    state: &S,
) {
    for Row { metric, source } in table {
        match source {
            Source::Total(value) => write_values(page, metric, &[(Labels::new(), value(state) as f64)]),
            Source::Each(values) => write_values(page, metric, &values(state)),
            Source::Distributions(values) => write_distributions(page, metric, &values(state)),
        }
    }
}

fn write_values(page: &mut String, metric: &Metric, values: &[(Labels, f64)]) {
    if values.is_empty() {
        return;
    }
    write_head(page, metric);
    for (labels, value) in values {
        write_name(page, metric, "", labels, None);
        // Writing to a String cannot fail.
        let _ = writeln!(page, " {value}");
    }
    page.push('\n');
}

fn write_distributions(page: &mut String, metric: &Metric, values: &[(Labels, Distribution)]) {
    if values.is_empty() {
        return;
    }
    write_head(page, metric);
    for (labels, distribution) in values {
        let mut below = 0;
        for (bound, count) in distribution.buckets() {
            below += count;
            let bound = bound.map_or("+Inf".to_owned(), |seconds| seconds.to_string());
            write_name(page, metric, "_bucket", labels, Some(&bound));
            let _ = writeln!(page, " {below}");
        }
        write_name(page, metric, "_sum", labels, None);
        let _ = writeln!(page, " {}", distribution.sum_seconds());
        write_name(page, metric, "_count", labels, None);
        let _ = writeln!(page, " {below}");
    }
    page.push('\n');
}

fn write_head(page: &mut String, Metric { name, kind, help, .. }: &Metric) {
    let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
}

/// Writes a sample's name and labels. `le` is the upper bound of a bucket.
fn write_name(page: &mut String, metric: &Metric, suffix: &str, labels: &[String], le: Option<&str>) {
    page.push_str(metric.name);
    page.push_str(suffix);
    let names = metric.labels.split(", ");
    let labelled = names.zip(labels.iter().map(String::as_str)).chain(le.map(|bound| ("le", bound)));
    let mut before = '{';
    for (name, value) in labelled {
        let _ = write!(page, "{before}{name}=\"");
        write_escaped(page, value);
        page.push('"');
        before = ',';
    }
    if before == ',' {
        page.push('}');
    }
}

/// Writes a label's value so that it stays inside its quotes. A client may have chosen it.
fn write_escaped(page: &mut String, value: &str) {
    for character in value.chars() {
        match character {
            '\\' => page.push_str("\\\\"),
            '"' => page.push_str("\\\""),
            '\n' => page.push_str("\\n"),
            other => page.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::{
        Histogram, MetricKind,
        table::{distributions, each, total},
    };

    struct State {
        names: Vec<&'static str>,
        took: Histogram<3>,
    }

    const TABLE: &[Row<State>] = &[
        total("a_total", MetricKind::Counter, "A.", |state| state.names.len() as u64),
        each("b", MetricKind::Gauge, "name, length", "B.", |state| {
            let value = |name: &&str| (vec![(*name).to_owned(), name.len().to_string()], 0.5);
            state.names.iter().map(value).collect()
        }),
        distributions("c_seconds", "", "C.", |state| vec![(Vec::new(), state.took.read())]),
        distributions("d_seconds", "call", "D.", |state| {
            state.names.iter().map(|name| (vec![(*name).to_owned()], state.took.read())).collect()
        }),
    ];

    fn page(names: &[&'static str]) -> String {
        let state = State { names: names.to_vec(), took: Histogram::new(&[10_000, 100_000]) };
        state.took.observe(Duration::from_millis(10));
        state.took.observe(Duration::from_secs(1));
        let mut page = String::new();
        write_metrics(&mut page, TABLE, &state);
        page
    }

    #[test]
    fn a_metric_without_values_is_left_out() {
        assert_eq!(
            page(&[]),
            "# HELP a_total A.\n# TYPE a_total counter\na_total 0\n\n\
             # HELP c_seconds C.\n# TYPE c_seconds histogram\n\
             c_seconds_bucket{le=\"0.01\"} 1\nc_seconds_bucket{le=\"0.1\"} 1\nc_seconds_bucket{le=\"+Inf\"} 2\n\
             c_seconds_sum 1.01\nc_seconds_count 2\n\n"
        );
    }

    #[test]
    fn values_of_labels_stay_inside_their_quotes() {
        let page = page(&["a\"b\\c\nd"]);
        for line in [
            "b{name=\"a\\\"b\\\\c\\nd\",length=\"7\"} 0.5",
            "d_seconds_bucket{call=\"a\\\"b\\\\c\\nd\",le=\"0.1\"} 1",
            "d_seconds_count{call=\"a\\\"b\\\\c\\nd\"} 2",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
        }
    }
}
