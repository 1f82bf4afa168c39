//! Puts the page together, and answers with it under a Content-Security-Policy that lets nothing else in.

use std::sync::Arc;

use axum::{
    Json, Router,
    http::StatusCode,
    response::{Html, IntoResponse, Response},
    routing::get,
};
use serde::Deserialize;
use serde_json::{Value, json};

const HTML: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");
const WIDGETS: &str = include_str!("widgets.js");

/// The page of a program.
#[derive(Debug, Clone, Copy)]
pub struct LivePage {
    /// The program's name, in the title and the head of the page.
    pub title: &'static str,
    /// A script that calls `show(build, update)` of widgets.js.
    pub script: &'static str,
    /// Random bits, other ones at each call.
    pub random: fn() -> [u8; 16],
}

impl LivePage {
    /// The route of the page.
    pub fn at_root<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        let parts: Arc<str> = HTML
            .replace("{{title}}", self.title)
            .replace("{{style}}", STYLE)
            .replace("{{script}}", &format!("{WIDGETS}\n{}", self.script))
            .into();
        Router::new().route("/", get(move || answer(Arc::clone(&parts), (self.random)())))
    }
}

/// The query of `/live`.
#[derive(Debug, Deserialize)]
pub struct After {
    /// The number of the first sample that the reader has not got.
    #[serde(default)]
    pub after: u64,
}

impl After {
    /// The answer to a query that is none.
    pub fn refused() -> (StatusCode, Json<Value>) {
        let sentence = "after is no number: ask for /live?after=0, or without a query";
        (StatusCode::BAD_REQUEST, Json(json!({ "error": sentence })))
    }
}

/// The page with a nonce of this answer, which its own style and script carry, and nothing that was put in by others.
async fn answer(parts: Arc<str>, random: [u8; 16]) -> Response {
    let nonce: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        ("content-security-policy", policy.as_str()),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
    ];
    (headers, Html(parts.replace("{{nonce}}", &nonce))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = format!("{HTML}{STYLE}{WIDGETS}");
        for outside in ["http:", "//cdn", "url(", "@import", "innerHTML", "eval(", "src="] {
            let lines = page.lines().filter(|line| line.contains(outside) && !line.contains("www.w3.org"));
            assert_eq!(lines.count(), 0, "{outside}");
        }
        for part in ["{{title}}", "{{style}}", "{{script}}", "{{nonce}}"] {
            assert!(HTML.contains(part), "{part}");
        }
    }
}
