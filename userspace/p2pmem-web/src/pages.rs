// SPDX-License-Identifier: MIT OR Apache-2.0

//! The page of the program, the login, and the files that pages load. All of them are in the program.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Extension, Form, State};
use axum::http::header::{CONTENT_TYPE, LOCATION, RETRY_AFTER, SET_COOKIE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::Router;
use serde::Deserialize;

use crate::error::{seconds, ApiError};
use crate::guard::{authorize, cookie_of, Peer};
use crate::site::{App, Asset, Site, SCRIPT, STYLE};

const LOGIN: &str = include_str!("../web/login.html");
/// Where the page of the login has the reason of a failure.
const MESSAGE: &str = "<!-- message -->";

const HTML: &str = "text/html; charset=utf-8";

/// The files that the pages of all programs load.
const ASSETS: [Asset; 6] = [
    Asset {
        path: "/assets/common.js",
        kind: SCRIPT,
        content: include_str!("../web/common.js"),
    },
    Asset {
        path: "/assets/common.css",
        kind: STYLE,
        content: include_str!("../web/common.css"),
    },
    Asset {
        path: "/assets/icon.svg",
        kind: "image/svg+xml",
        content: include_str!("../web/icon.svg"),
    },
    Asset {
        path: "/assets/uplot.js",
        kind: SCRIPT,
        content: include_str!(concat!(env!("OUT_DIR"), "/uplot.js")),
    },
    Asset {
        path: "/assets/uplot.css",
        kind: STYLE,
        content: include_str!(concat!(env!("OUT_DIR"), "/uplot.css")),
    },
    Asset {
        path: "/assets/uplot.license.txt",
        kind: "text/plain; charset=utf-8",
        content: include_str!(concat!(env!("OUT_DIR"), "/uplot.license")),
    },
];

pub(crate) fn routes(site: &'static Site) -> Router<Arc<App>> {
    let mut router = Router::new()
        .route("/", get(index))
        .route("/login", get(login_page).post(log_in))
        .route("/logout", post(log_out));
    for asset in ASSETS.iter().chain(site.assets) {
        let Asset { path, kind, content } = *asset;
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
        Ok(_) => page(StatusCode::OK, app.site.index),
        Err(_) => redirect("/login"),
    }
}

async fn login_page(State(app): State<Arc<App>>) -> Response {
    page(StatusCode::OK, login(app.site))
}

/// Returns the page of the login of a program.
fn login(site: &Site) -> String {
    LOGIN
        .replace("{title}", site.title)
        .replace("{name}", site.name)
        .replace("{hint}", site.token_hint)
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
        return failed(
            app.site,
            &ApiError::new(StatusCode::BAD_REQUEST, "the form is not valid; enter the token"),
        );
    };
    // A token is usually pasted, with blanks around it.
    let value = app
        .auth
        .log_in(address(peer).0, credentials.token.trim(), Instant::now());
    match value {
        Ok(value) => {
            let mut response = redirect("/");
            let lasts = app.auth.lasts().as_secs();
            set_cookie(&app, &mut response, &headers, &format!("{value}; Max-Age={lasts}"));
            response
        }
        Err(refusal) => failed(app.site, &refusal.into()),
    }
}

fn failed(site: &Site, error: &ApiError) -> Response {
    // The messages of this crate have no characters that are special in HTML.
    let message = format!(r#"<p role="alert" id="message" class="message">{}</p>"#, error.message);
    let mut response = page(error.status, login(site).replace(MESSAGE, &message));
    if let Some(time) = error.retry_after {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds(time)));
    }
    response
}

async fn log_out(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    if let Some(value) = cookie_of(&headers, &app.cookie) {
        app.auth.log_out(value);
    }
    let mut response = redirect("/login");
    set_cookie(&app, &mut response, &headers, "; Max-Age=0");
    response
}

/// Adds the cookie with a value and further attributes. Behind a proxy with TLS, the browser sends it only encrypted.
fn set_cookie(app: &App, response: &mut Response, request: &HeaderMap, value: &str) {
    let encrypted = request.get("x-forwarded-proto").is_some_and(|scheme| scheme == "https");
    let secure = if encrypted { "; Secure" } else { "" };
    let cookie = format!("{}={value}; Path=/; HttpOnly; SameSite=Strict{secure}", app.cookie);
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
}
