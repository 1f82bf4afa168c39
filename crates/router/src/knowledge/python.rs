//! Functions of Python that chat templates use: JSON as `json.dumps` writes it, and `strftime_now`.

use std::{
    fmt::Write,
    time::{Duration, SystemTime},
};

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};

/// Most levels of nested lists and maps.
const DEPTH_MAX: usize = 200;
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The filter `tojson` as in Hugging Face's templates: members in their order, nothing escaped for HTML.
pub(super) fn to_json(value: &Value, given: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = given.get("indent")?;
    // Further arguments of Python's function. They are accepted, and their defaults apply.
    let _: (Option<Value>, Option<Value>, Option<Value>) =
        (given.get("ensure_ascii")?, given.get("separators")?, given.get("sort_keys")?);
    let mut json = String::new();
    dump(value, indent, 0, &mut json)?;
    Ok(json)
}

fn dump(value: &Value, indent: Option<usize>, level: usize, json: &mut String) -> Result<(), Error> {
    if level > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deep"));
    }
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => json.push_str("null"),
        ValueKind::Bool => json.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => {
            let _ = write!(json, "{value}");
        }
        ValueKind::Map => {
            let mut members = Vec::new();
            for key in value.try_iter()? {
                let of = value.get_item(&key)?;
                members.push((Some(key), of));
            }
            dump_all('{', members, '}', indent, level, json)?;
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let elements = value.try_iter()?.map(|element| (None, element)).collect();
            dump_all('[', elements, ']', indent, level, json)?;
        }
        _ => quote(value.as_str().unwrap_or(&value.to_string()), json),
    }
    Ok(())
}

fn dump_all(
    open: char,
    members: Vec<(Option<Value>, Value)>,
    close: char,
    indent: Option<usize>,
    level: usize,
    json: &mut String,
) -> Result<(), Error> {
    json.push(open);
    let is_empty = members.is_empty();
    for (number, (key, value)) in members.into_iter().enumerate() {
        if number > 0 {
            json.push_str(if indent.is_some() { "," } else { ", " });
        }
        new_line(indent, level + 1, json);
        if let Some(key) = key {
            quote(key.as_str().unwrap_or(&key.to_string()), json);
            json.push_str(": ");
        }
        dump(&value, indent, level + 1, json)?;
    }
    if !is_empty {
        new_line(indent, level, json);
    }
    json.push(close);
    Ok(())
}

fn new_line(indent: Option<usize>, level: usize, json: &mut String) {
    if let Some(indent) = indent {
        json.push('\n');
        json.extend(std::iter::repeat_n(' ', indent.saturating_mul(level).min(1024)));
    }
}

fn quote(text: &str, json: &mut String) {
    json.push_str(&serde_json::Value::from(text).to_string());
}

/// The function `strftime_now`, in UTC: most engines run in it, and the router may be in another time zone than they are.
pub(super) fn strftime_now(format: &str) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    strftime(format, now)
}

/// A time since 1970 as Python's `strftime` formats it. Unknown directives stay as they are.
fn strftime(format: &str, since: Duration) -> String {
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let weekday = DAYS[((days + 4) % 7) as usize];
    let month_name = MONTHS[(month as usize).clamp(1, 12) - 1];
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let _ = match letters.next() {
            Some('d') => write!(text, "{day:02}"),
            Some('m') => write!(text, "{month:02}"),
            Some('Y') => write!(text, "{year}"),
            Some('y') => write!(text, "{:02}", year % 100),
            Some('B') => write!(text, "{month_name}"),
            Some('b') => write!(text, "{}", &month_name[..3]),
            Some('A') => write!(text, "{weekday}"),
            Some('a') => write!(text, "{}", &weekday[..3]),
            Some('H') => write!(text, "{hour:02}"),
            Some('I') => write!(text, "{:02}", (hour + 11) % 12 + 1),
            Some('M') => write!(text, "{minute:02}"),
            Some('S') => write!(text, "{second:02}"),
            Some('p') => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('F') => write!(text, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(text, "{hour:02}:{minute:02}:{second:02}"),
            Some('%') => write!(text, "%"),
            Some(other) => write!(text, "%{other}"),
            None => write!(text, "%"),
        };
    }
    text
}

/// Year, month and day of a day since 1970, by the calendar's cycle of 400 years, counted from a March.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (cycle * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // date -u -d @... says the same.
        let of =
            |seconds| strftime("%a %d %B %Y, %b %y %I:%M:%S %p %F %T %% %q", Duration::from_secs(seconds));
        assert_eq!(of(0), "Thu 01 January 1970, Jan 70 12:00:00 AM 1970-01-01 00:00:00 % %q");
        assert_eq!(of(951_827_696), "Tue 29 February 2000, Feb 00 12:34:56 PM 2000-02-29 12:34:56 % %q");
        assert_eq!(of(1_795_561_199), "Tue 24 November 2026, Nov 26 10:59:59 PM 2026-11-24 22:59:59 % %q");
    }
}
