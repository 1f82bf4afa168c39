//! Decides by method and path which requests pass to engines. Pure.
//!
//! The paths are an allow-list, taken from vLLM 0.32's API server. Any other path may change an engine for all its clients, as
//! `/v1/load_lora_adapter`, `/sleep` and `/update_weights` do.

use hyper::{
    HeaderMap, Method, StatusCode,
    header::{ACCESS_CONTROL_REQUEST_METHOD, ORIGIN},
};

use super::answer::Problem;
use crate::legs::Api;

/// Paths that run the model on one engine.
const RUN_THE_MODEL: [&str; 17] = [
    "/classify",
    "/generative_scoring",
    "/pooling",
    "/rerank",
    "/score",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/systemone",
    "/v2/embed",
    "/v2/rerank",
    // Served by vLLM-Omni.
    "/v1/audio/speech",
    "/v1/images/edits",
    "/v1/images/generations",
];
/// Paths that read or change text only, for which no engine computes blocks.
const READ_TEXT: [&str; 9] = [
    "/detokenize",
    "/tokenize",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
];
const HEALTH: &str = "/health";
const MODELS: &str = "/v1/models";
const VERSION: &str = "/version";

/// How the router handles a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// The router answers whether a node is ready.
    Health,
    /// The router answers which models its nodes serve.
    Models,
    /// A node computes the answer. With an interface, the request may be split between two nodes.
    Generates(Option<Api>),
    /// A node answers without its model, and caches nothing of the request.
    Reads,
    /// A node answers which origins may send requests. A browser shows no key here.
    Preflight,
}

/// The route of a request. `all_posts`: the operator lets clients change engines.
pub(super) fn route(
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    all_posts: bool,
) -> Result<Route, Problem> {
    let not_served = || Problem::new(StatusCode::NOT_FOUND, format!("{method} {path} is not served here"));
    match (method, path) {
        (&Method::GET, HEALTH) => Ok(Route::Health),
        (&Method::GET, MODELS) => Ok(Route::Models),
        (&Method::GET, VERSION) => Ok(Route::Reads),
        (&Method::OPTIONS, _) if is_preflight(headers) && is_known(path) => Ok(Route::Preflight),
        (_, HEALTH | MODELS | VERSION) => {
            Err(Problem::new(StatusCode::METHOD_NOT_ALLOWED, format!("{path} takes GET, not {method}")))
        }
        (&Method::POST, _) => match Api::of(path) {
            Some(api) => Ok(Route::Generates(Some(api))),
            None if READ_TEXT.contains(&path) => Ok(Route::Reads),
            None if RUN_THE_MODEL.contains(&path) => Ok(Route::Generates(None)),
            None if !is_plain(path) => Err(not_served()),
            None if all_posts => Ok(Route::Generates(None)),
            None => Err(Problem::new(
                StatusCode::FORBIDDEN,
                format!(
                    "POST {path} is no request for inference and may change an engine for all its clients: this \
                     router passes it on only if it was started with --allow-admin-paths"
                ),
            )),
        },
        _ => Err(not_served()),
    }
}

/// Whether a browser asks for the permissions of a page of another origin (a CORS preflight).
fn is_preflight(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN) && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

fn is_known(path: &str) -> bool {
    Api::of(path).is_some()
        || READ_TEXT.contains(&path)
        || RUN_THE_MODEL.contains(&path)
        || matches!(path, MODELS | VERSION)
}

/// Whether engines read the path as the router does: they decode escapes.
fn is_plain(path: &str) -> bool {
    !path.contains('%') && path.split('/').skip(1).all(|part| !matches!(part, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(method: &Method, path: &str, all_posts: bool) -> u16 {
        let routed = route(method, path, &HeaderMap::new(), all_posts);
        routed.map_or_else(|problem| problem.status.as_u16(), |_| 200)
    }

    #[test]
    fn only_an_operator_lets_clients_change_engines() {
        for path in
            ["/v1/load_lora_adapter", "/sleep", "/update_weights", "/reset_prefix_cache", "/v1/anything"]
        {
            assert_eq!(status(&Method::POST, path, false), 403, "{path}");
            assert_eq!(status(&Method::POST, path, true), 200, "{path}");
            assert_eq!(status(&Method::GET, path, true), 404, "{path}");
        }
        for path in ["/v1/%72esponses", "/v1//completions", "/v1/x/../completions", "/v1/"] {
            assert_eq!(status(&Method::POST, path, true), 404, "{path}");
        }
    }
}
