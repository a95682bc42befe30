// SPDX-License-Identifier: MIT OR Apache-2.0

//! The pages, their scripts and styles, which are in the program, and the login.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Extension, Form, State};
use axum::http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER, SET_COOKIE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::Router;
use serde::Deserialize;

use super::app::App;
use super::auth::COOKIE;
use super::error::{seconds, ApiError};
use super::guard::{authorize, cookie_of, Peer};

const INDEX: &str = include_str!("../../web/index.html");
const LOGIN: &str = include_str!("../../web/login.html");
/// Where the page of the login has the reason of a failure.
const MESSAGE: &str = "<!-- message -->";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// The files that the pages load: path, type, and content.
const ASSETS: [(&str, &str, &str); 6] = [
    ("/assets/app.js", SCRIPT, include_str!("../../web/app.js")),
    ("/assets/style.css", STYLE, include_str!("../../web/style.css")),
    ("/assets/icon.svg", "image/svg+xml", include_str!("../../web/icon.svg")),
    (
        "/assets/uplot.js",
        SCRIPT,
        include_str!(concat!(env!("OUT_DIR"), "/uplot.js")),
    ),
    (
        "/assets/uplot.css",
        STYLE,
        include_str!(concat!(env!("OUT_DIR"), "/uplot.css")),
    ),
    (
        "/assets/uplot.license.txt",
        "text/plain; charset=utf-8",
        include_str!(concat!(env!("OUT_DIR"), "/uplot.license")),
    ),
];

pub(super) fn routes() -> Router<Arc<App>> {
    let mut router = Router::new()
        .route("/", get(index))
        .route("/login", get(login_page).post(log_in))
        .route("/logout", post(log_out));
    for (path, kind, content) in ASSETS {
        router = router.route(path, get(move || async move { ([(CONTENT_TYPE, kind)], content) }));
    }
    router
}

fn page(status: StatusCode, html: impl Into<String>) -> Response {
    (status, [(CONTENT_TYPE, HTML)], html.into()).into_response()
}

fn redirect(path: &'static str) -> Response {
    (StatusCode::SEE_OTHER, [(LOCATION, path)]).into_response()
}

async fn index(State(app): State<Arc<App>>, peer: Option<Extension<Peer>>, headers: HeaderMap) -> Response {
    match authorize(&app, address(peer), &headers) {
        Ok(_) => page(StatusCode::OK, INDEX),
        Err(_) => redirect("/login"),
    }
}

async fn login_page() -> Response {
    page(StatusCode::OK, LOGIN)
}

fn address(peer: Option<Extension<Peer>>) -> Peer {
    peer.map_or(Peer([0, 0, 0, 0].into()), |Extension(peer)| peer)
}

#[derive(Deserialize)]
struct Credentials {
    #[serde(default)]
    token: String,
}

/// Logs in with the token of the form. A failure shows the form again, with the reason.
async fn log_in(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    form: Result<Form<Credentials>, axum::extract::rejection::FormRejection>,
) -> Response {
    let Ok(Form(credentials)) = form else {
        return failed(&ApiError::new(
            StatusCode::BAD_REQUEST,
            "the form is not valid; enter the token",
        ));
    };
    // A token is usually pasted, with blanks around it.
    let value = app
        .auth
        .log_in(address(peer).0, credentials.token.trim(), Instant::now());
    match value {
        Ok(value) => {
            let mut response = redirect("/");
            let lasts = app.auth.lasts().as_secs();
            set_cookie(&mut response, &headers, &format!("{value}; Max-Age={lasts}"));
            response
        }
        Err(refusal) => failed(&refusal.into()),
    }
}

fn failed(error: &ApiError) -> Response {
    // The messages of this module have no characters that are special in HTML.
    let message = format!(r#"<p role="alert" id="message" class="message">{}</p>"#, error.message);
    let mut response = page(error.status, LOGIN.replace(MESSAGE, &message));
    if let Some(time) = error.retry_after {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds(time)));
    }
    response
}

async fn log_out(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    if let Some(value) = cookie_of(&headers) {
        app.auth.log_out(value);
    }
    let mut response = redirect("/login");
    set_cookie(&mut response, &headers, "; Max-Age=0");
    response
}

/// Adds the cookie with a value and further attributes. Behind a proxy with TLS, the browser sends it only encrypted.
fn set_cookie(response: &mut Response, request: &HeaderMap, value: &str) {
    let encrypted = request.get("x-forwarded-proto").is_some_and(|scheme| scheme == "https");
    let secure = if encrypted { "; Secure" } else { "" };
    let cookie = format!("{COOKIE}={value}; Path=/; HttpOnly; SameSite=Strict{secure}");
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
}
