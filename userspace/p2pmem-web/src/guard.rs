// SPDX-License-Identifier: MIT OR Apache-2.0

//! What applies to every request: the limits of its body, protection from requests of other sites, and headers of the answer.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{
    HeaderName, AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, COOKIE, HOST, ORIGIN, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::{from_fn, from_fn_with_state, Next};
use axum::response::{IntoResponse, Response};
use axum::Router;
use http_body_util::{BodyExt, Limited};

use crate::auth::{self, Login, Refusal};
use crate::error::{seconds, ApiError};
use crate::site::{App, MAX_BODY};

/// How long the body of a request may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Pages load nothing from other servers and have no inline scripts.
const CONTENT_POLICY: &str =
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

/// The address of the client, an extension of each request.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub IpAddr);

/// Adds the checks and the headers to all routes.
pub(crate) fn protect(router: Router, cookie: Arc<str>) -> Router {
    router
        .layer(from_fn(limit_body))
        .layer(from_fn_with_state(cookie, refuse_other_sites))
        .layer(from_fn(add_headers))
}

/// Reads the body, so that no handler waits for a slow client.
async fn limit_body(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY).collect()).await;
    match bytes {
        Ok(Ok(bytes)) => next.run(Request::from_parts(parts, Body::from(bytes.to_bytes()))).await,
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the body of the request is too large; send at most {MAX_BODY} bytes"),
        )
        .into_response(),
        Ok(Err(error)) => ApiError::new(
            StatusCode::BAD_REQUEST,
            format!("the body of the request is incomplete: {error}"),
        )
        .into_response(),
        Err(_) => ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "the body of the request did not arrive in time; send it at once",
        )
        .into_response(),
    }
}

async fn refuse_other_sites(State(cookie): State<Arc<str>>, request: Request, next: Next) -> Response {
    let reads = [Method::GET, Method::HEAD].contains(request.method());
    if !reads && !is_own_site(request.headers(), &cookie) {
        return ApiError::new(
            StatusCode::FORBIDDEN,
            "the request comes from another site; use the pages of this server, or send the header Authorization instead of the cookie",
        )
        .into_response();
    }
    next.run(request).await
}

/// Whether a page of this server sent a request that changes something, or a program without a cookie. Browsers always send
/// one of the headers `Sec-Fetch-Site` and `Origin`.
fn is_own_site(headers: &HeaderMap, cookie: &str) -> bool {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if let Some(site) = text(HeaderName::from_static("sec-fetch-site")) {
        return matches!(site, "same-origin" | "none");
    }
    if let Some(origin) = text(ORIGIN) {
        let host = origin.split_once("://").map(|(_, host)| host);
        return host.is_some() && host == text(HOST);
    }
    cookie_of(headers, cookie).is_none()
}

async fn add_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, CONTENT_POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Returns the value of the login's cookie.
pub(crate) fn cookie_of<'a>(headers: &'a HeaderMap, cookie: &str) -> Option<&'a str> {
    headers
        .get_all(COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .find_map(|header| auth::cookie(header, cookie))
}

/// Returns how a request is authorized.
pub(crate) fn authorize(app: &App, peer: Peer, headers: &HeaderMap) -> Result<Login, ApiError> {
    let now = Instant::now();
    if let Some(value) = headers.get(AUTHORIZATION) {
        let token = value.to_str().ok().and_then(|value| value.strip_prefix("Bearer "));
        app.auth.check(peer.0, token.unwrap_or_default(), now)?;
        return Ok(Login::Token);
    }
    let login = cookie_of(headers, &app.cookie).map(|value| Login::Cookie(value.to_owned()));
    login.filter(|login| app.auth.is_valid(login, now)).ok_or_else(|| {
        ApiError::new(
            StatusCode::UNAUTHORIZED,
            "the request has no valid login; log in at /login, or send the token in the header Authorization: Bearer TOKEN",
        )
    })
}

/// Lets only authorized requests pass, and adds to them how they are authorized.
pub(crate) async fn require_login(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    match authorize(&app, peer_of(&request), request.headers()) {
        Ok(login) => {
            request.extensions_mut().insert(login);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

/// Returns the address that the server found.
pub(crate) fn peer_of(request: &Request) -> Peer {
    let unknown = Peer(IpAddr::from([0, 0, 0, 0]));
    request.extensions().get().copied().unwrap_or(unknown)
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Wrong => Self::new(
                StatusCode::UNAUTHORIZED,
                "the token is wrong; enter the token that the program was started with",
            ),
            Refusal::TooMany(time) => Self {
                retry_after: Some(time),
                ..Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    format!("too many attempts with a wrong token; try again in {} s", seconds(time)),
                )
            },
            Refusal::NoRandom => Self::busy("the kernel gave no random number; try again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(headers: &[(&'static str, &str)]) -> bool {
        let headers: HeaderMap = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect();
        is_own_site(&headers, "login")
    }

    #[test]
    fn requests_of_other_sites_are_recognized() {
        let cookie = ("cookie", "login=x");
        assert!(own(&[("sec-fetch-site", "same-origin"), cookie]));
        for site in ["cross-site", "same-site", "?"] {
            assert!(!own(&[("sec-fetch-site", site), cookie]), "{site}");
            assert!(!own(&[("sec-fetch-site", site)]), "{site}");
        }
        assert!(own(&[("origin", "http://node:8080"), ("host", "node:8080"), cookie]));
        for origin in ["http://other:8080", "http://node", "null", ""] {
            assert!(!own(&[("origin", origin), ("host", "node:8080"), cookie]), "{origin}");
        }
        assert!(!own(&[("origin", "null"), cookie]));
        assert!(!own(&[cookie]), "a browser sends one of the headers");
        assert!(own(&[]), "a program without a cookie");
        assert!(own(&[("cookie", "other=x")]));
    }
}
