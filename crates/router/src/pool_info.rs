//! Reads which pool an engine shares with others, from `vllm:kvlane_pool_info` in its page of metrics.

/// Metric that kvlane's connector sets to 1 for the daemon and the space that its engine uses, and to 0 for former ones.
const NAME: &str = "vllm:kvlane_pool_info{";
/// Longest label that the router accepts; kvlane's labels have 32 hex digits.
const LABEL_MAX: usize = 64;

/// The name of the pool that an engine loads from, `DAEMON/SPACE`. None if the page names no pool, or if data-parallel ranks name
/// several. With `rank` only the lines of that rank count.
pub(crate) fn pool_of(page: &str, rank: Option<u32>) -> Option<String> {
    let rank = rank.map(|rank| rank.to_string());
    let mut found = None;
    for line in page.lines() {
        let Some((labels, value)) = line.strip_prefix(NAME).and_then(|rest| rest.rsplit_once('}')) else {
            continue;
        };
        let is_of_rank = rank.as_deref().is_none_or(|rank| label(labels, "engine") == Some(rank));
        let is_set = value.split_whitespace().next().and_then(|value| value.parse().ok()) == Some(1.0);
        if !is_of_rank || !is_set {
            continue;
        }
        let name = format!("{}/{}", label(labels, "daemon")?, label(labels, "space")?);
        if found.get_or_insert_with(|| name.clone()) != &name {
            return None;
        }
    }
    found
}

/// The value of a label, if it has only letters and digits, and at most [`LABEL_MAX`] of them.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let ahead = format!("{name}=\"");
    let is_whole = |at: &usize| *at == 0 || labels.as_bytes()[at - 1] == b',';
    let at = labels.match_indices(&ahead).map(|(at, _)| at).find(is_whole)?;
    let (value, _) = labels[at + ahead.len()..].split_once('"')?;
    let fits =
        (1..=LABEL_MAX).contains(&value.len()) && value.bytes().all(|byte| byte.is_ascii_alphanumeric());
    fits.then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(engine: u32, daemon: &str, space: &str, value: f64) -> String {
        let labels =
            format!("model_name=\"a }} b\",engine=\"{engine}\",daemon=\"{daemon}\",space=\"{space}\"");
        format!("vllm:kvlane_pool_info{{{labels}}} {value}\n")
    }

    #[test]
    fn an_engine_names_its_daemon_and_space_and_former_ones_do_not_count() {
        let page =
            format!("vllm:num_requests_running 1\n{}{}", line(0, "aa", "ff", 0.0), line(0, "bb", "ff", 1.0));
        assert_eq!(pool_of(&page, None).as_deref(), Some("bb/ff"));
        assert_eq!(pool_of(&page, Some(0)).as_deref(), Some("bb/ff"));
        assert_eq!(pool_of(&page, Some(1)), None);
        let two = format!("{page}{}", line(1, "bb", "00", 1.0));
        assert_eq!((pool_of(&two, None), pool_of(&two, Some(1)).as_deref()), (None, Some("bb/00")));
    }

    #[test]
    fn odd_pages_name_no_pool() {
        let long = "a".repeat(LABEL_MAX + 1);
        for page in [
            String::new(),
            "vllm:kvlane_pool_info 1".into(),
            "vllm:kvlane_pool_info{daemon=\"a\"} 1".into(),
            "vllm:kvlane_pool_info{daemon=\"a\",space=\"b\"".into(),
            "vllm:kvlane_pool_info{mydaemon=\"a\",space=\"b\"} 1".into(),
            line(0, "a b", "c", 1.0),
            line(0, "", "c", 1.0),
            line(0, &long, "c", 1.0),
            line(0, "a", "c", f64::NAN),
        ] {
            assert_eq!(pool_of(&page, None), None, "{page}");
        }
    }
}
