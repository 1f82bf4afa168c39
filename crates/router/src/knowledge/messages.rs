//! Converts a chat's messages and tools to what vLLM passes to a template, which differs from the request in some members.

use minijinja::{Value, value::ValueKind};

/// Members of a tool's function that vLLM always passes, in this order, also if the request lacks them.
const OF_A_FUNCTION: [&str; 3] = ["name", "description", "parameters"];

/// Content whose prompt only the engine knows: pictures, sounds, messages of no known shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotText;

/// The messages of a body. `as_parts`: the template expects lists of parts.
///
/// # Errors
/// A message is not text.
pub fn messages(raw: &[u8], as_parts: bool) -> Result<Value, NotText> {
    let parsed: Value = serde_json::from_slice(raw).map_err(|_| NotText)?;
    let each = parsed.try_iter().map_err(|_| NotText)?;
    each.map(|each| message(&each, as_parts)).collect::<Result<Vec<_>, _>>().map(Value::from)
}

fn message(given: &Value, as_parts: bool) -> Result<Value, NotText> {
    if given.kind() != ValueKind::Map || member(given, "role").is_none() {
        return Err(NotText);
    }
    let mut kept = Vec::new();
    for key in given.try_iter().map_err(|_| NotText)? {
        let value = given.get_item(&key).map_err(|_| NotText)?;
        let value = match key.as_str() {
            Some("content") => content(&value, as_parts)?,
            Some("tool_calls") if !value.is_none() => calls(&value)?,
            _ if value.is_none() => continue,
            _ => value,
        };
        kept.push((key, value));
    }
    if member(given, "content").is_none() {
        kept.push((Value::from("content"), content(&Value::from(()), as_parts)?));
    }
    Ok(kept.into_iter().collect())
}

fn content(given: &Value, as_parts: bool) -> Result<Value, NotText> {
    let texts: Vec<String> = match given.kind() {
        ValueKind::None | ValueKind::Undefined => Vec::new(),
        ValueKind::String => vec![given.as_str().unwrap_or_default().to_owned()],
        ValueKind::Seq => {
            given.try_iter().map_err(|_| NotText)?.map(|part| text_of(&part)).collect::<Result<_, _>>()?
        }
        _ => return Err(NotText),
    };
    if !as_parts {
        return Ok(Value::from(texts.join("\n")));
    }
    let part = |text: String| -> Value {
        [("type", Value::from("text")), ("text", Value::from(text))].into_iter().collect()
    };
    Ok(Value::from(texts.into_iter().map(part).collect::<Vec<_>>()))
}

fn text_of(part: &Value) -> Result<String, NotText> {
    if let Some(text) = part.as_str() {
        return Ok(text.to_owned());
    }
    let is_text =
        member(part, "type").is_none_or(|kind| matches!(kind.as_str(), Some("text" | "input_text")));
    let text = member(part, "text").filter(|_| is_text).ok_or(NotText)?;
    text.as_str().map(str::to_owned).ok_or(NotText)
}

/// Parses the arguments of tool calls, because they come as a string of JSON and templates expect its value.
fn calls(given: &Value) -> Result<Value, NotText> {
    let each = given.try_iter().map_err(|_| NotText)?;
    let call = |call: Value| -> Result<Value, NotText> {
        let Some(function) = member(&call, "function") else { return Ok(call) };
        let arguments = match member(&function, "arguments") {
            Some(text) if text.as_str().is_some_and(|text| !text.is_empty()) => {
                serde_json::from_str(text.as_str().unwrap_or_default()).map_err(|_| NotText)?
            }
            Some(other) if other.kind() == ValueKind::Map => other,
            _ => std::iter::empty::<(Value, Value)>().collect(),
        };
        let function = with(&function, "arguments", arguments)?;
        with(&call, "function", function)
    };
    each.map(call).collect::<Result<Vec<_>, _>>().map(Value::from)
}

/// The tools of a body. None if it has none.
///
/// # Errors
/// A tool has no known shape.
pub fn tools(raw: &[u8]) -> Result<Option<Value>, NotText> {
    let parsed: Value = serde_json::from_slice(raw).map_err(|_| NotText)?;
    if parsed.is_none() {
        return Ok(None);
    }
    let each = parsed.try_iter().map_err(|_| NotText)?;
    let tool = |given: Value| -> Result<Value, NotText> {
        let function = member(&given, "function").ok_or(NotText)?;
        let kind = member(&given, "type").unwrap_or_else(|| Value::from("function"));
        let mut members: Vec<(Value, Value)> = OF_A_FUNCTION
            .iter()
            .map(|&name| (Value::from(name), member(&function, name).unwrap_or_else(|| Value::from(()))))
            .collect();
        for key in function.try_iter().map_err(|_| NotText)? {
            if !key.as_str().is_some_and(|key| OF_A_FUNCTION.contains(&key)) {
                let value = function.get_item(&key).map_err(|_| NotText)?;
                members.push((key, value));
            }
        }
        let function: Value = members.into_iter().collect();
        Ok([("type", kind), ("function", function)].into_iter().collect())
    };
    each.map(tool).collect::<Result<Vec<_>, _>>().map(|tools| Some(Value::from(tools)))
}

fn member(of: &Value, name: &str) -> Option<Value> {
    of.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

/// A copy of the map with one member replaced in its position, or appended.
fn with(map: &Value, name: &str, value: Value) -> Result<Value, NotText> {
    let mut members = Vec::new();
    let mut value = Some(value);
    for key in map.try_iter().map_err(|_| NotText)? {
        let is_it = key.as_str() == Some(name);
        let of = if is_it { value.take() } else { None };
        let of = of.map_or_else(|| map.get_item(&key).map_err(|_| NotText), Ok)?;
        members.push((key, of));
    }
    members.extend(value.map(|value| (Value::from(name), value)));
    Ok(members.into_iter().collect())
}
