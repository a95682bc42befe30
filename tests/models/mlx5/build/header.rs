// SPDX-License-Identifier: MIT OR Apache-2.0

//! Parses C headers of the mlx5 driver: the offset of each structure member, and the value of each enumerator.
//!
//! The parser supports two kinds of structures. `mlx5_ifc_*_bits` structures describe big-endian bit fields: each `u8`
//! stands for one bit. All others are C structures of fixed-width members. The parser skips structures with other
//! members (pointers, kernel types); code that uses such a structure does not compile.

use std::collections::BTreeMap;
use std::fmt;

/// Contents of the headers that were read.
#[derive(Debug, Default)]
pub struct Headers {
    /// Structures and unions by their C name.
    pub types: BTreeMap<String, Layout>,
    /// Enumerators and simple macros.
    pub constants: BTreeMap<String, u64>,
}

/// Size and members of a structure or union, in bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Total size.
    pub bits: u64,
    /// Alignment.
    pub align: u64,
    /// Members in order. Includes members of nested unnamed structures, and members of named ones as `outer_inner`.
    pub members: Vec<Member>,
}

/// A member of a structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name.
    pub name: String,
    /// Offset in the structure, in bits.
    pub offset: u64,
    /// Width of one element, in bits.
    pub width: u64,
    /// Number of elements; `None` if the member is no array, 0 for a flexible array.
    pub count: Option<u64>,
    /// Whether the element is a structure.
    pub aggregate: bool,
}

/// A syntax error, with its position.
#[derive(Debug)]
pub struct HeaderError(String);

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for HeaderError {}

type Result<T> = std::result::Result<T, HeaderError>;

fn fail<T>(text: impl Into<String>) -> Result<T> {
    Err(HeaderError(text.into()))
}

/// Meaning of a member's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// `mlx5_ifc` structure: a `u8` is one bit.
    Bits,
    /// C structure.
    Bytes,
}

/// A cursor over tokens.
struct Tokens<'a> {
    all: &'a [String],
    at: usize,
}

impl<'a> Tokens<'a> {
    fn peek(&self, ahead: usize) -> &'a str {
        self.all.get(self.at + ahead).map_or("", String::as_str)
    }

    fn next(&mut self) -> &'a str {
        let token = self.peek(0);
        self.at += 1;
        token
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.peek(0) == token;
        if found {
            self.at += 1;
        }
        found
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        if self.take(token) {
            return Ok(());
        }
        fail(format!("{token:?} expected, {:?} found", self.peek(0)))
    }

    fn done(&self) -> bool {
        self.at >= self.all.len()
    }

    /// Skips all tokens up to and including the bracket that closes the last one.
    fn skip_balanced(&mut self) {
        let mut depth = 1;
        while depth > 0 && !self.done() {
            match self.next() {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
        }
    }

    /// Returns the tokens up to the bracket that closes the last one, and skips that bracket.
    fn balanced(&mut self) -> &'a [String] {
        let start = self.at.min(self.all.len());
        self.skip_balanced();
        let end = self.at.saturating_sub(1).clamp(start, self.all.len());
        &self.all[start..end]
    }
}

/// Removes comments and joins continued lines.
fn strip_comments(text: &str) -> String {
    let text = text.replace("\\\n", " ");
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(start) = rest.find('/') {
        out.push_str(&rest[..start]);
        let tail = &rest[start..];
        rest = if tail.starts_with("/*") {
            out.push(' ');
            tail.find("*/").map_or("", |end| &tail[end + 2..])
        } else if tail.starts_with("//") {
            tail.find('\n').map_or("", |end| &tail[end..])
        } else {
            out.push('/');
            &tail[1..]
        };
    }
    out.push_str(rest);
    out
}

fn tokenize(text: &str) -> Vec<String> {
    let mut tokens: Vec<String> = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let mut token = String::from(c);
        if c.is_alphanumeric() || c == '_' {
            while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                token.push(c);
            }
        } else if c == '<' || c == '>' {
            if let Some(again) = chars.next_if_eq(&c) {
                token.push(again);
            }
        } else if c.is_whitespace() {
            continue;
        }
        tokens.push(token);
    }
    tokens
}

impl Headers {
    /// Reads a header. The headers it depends on must be read before.
    ///
    /// # Errors
    ///
    /// If an `mlx5_ifc` structure cannot be parsed.
    pub fn read(&mut self, text: &str) -> Result<()> {
        let text = strip_comments(text);
        let mut code = String::with_capacity(text.len());
        for line in text.lines() {
            match line.trim_start().strip_prefix('#') {
                Some(directive) => self.define(directive),
                None => {
                    code.push_str(line);
                    code.push('\n');
                }
            }
        }
        let all = tokenize(&code);
        let mut tokens = Tokens { all: &all, at: 0 };
        while !tokens.done() {
            match tokens.next() {
                "enum" => {
                    if tokens.peek(0) != "{" {
                        tokens.next();
                    }
                    if tokens.take("{") {
                        self.enumerators(tokens.balanced());
                    }
                }
                word @ ("struct" | "union") if tokens.peek(1) == "{" => {
                    let union = word == "union";
                    let name = tokens.next().to_owned();
                    tokens.expect("{")?;
                    let body = tokens.balanced();
                    let packed = tokens.take("__packed");
                    let ifc = name.starts_with("mlx5_ifc_");
                    let unit = if ifc { Unit::Bits } else { Unit::Bytes };
                    match self.aggregate(body, union, unit, packed) {
                        Ok(layout) => {
                            self.types.insert(name, layout);
                        }
                        Err(error) if ifc => return fail(format!("{name}: {error}")),
                        Err(_) => {}
                    }
                }
                "{" | "(" => tokens.skip_balanced(),
                _ => {}
            }
        }
        Ok(())
    }

    fn define(&mut self, directive: &str) {
        let Some(rest) = directive.trim_start().strip_prefix("define") else {
            return;
        };
        let rest = rest.trim_start();
        let end = rest
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        let (name, value) = rest.split_at(end);
        // A bracket directly after the name starts a macro with arguments.
        if value.starts_with('(') || value.trim().is_empty() {
            return;
        }
        if let Some(value) = self.value(&tokenize(value)) {
            self.constants.insert(name.to_owned(), value);
        }
    }

    fn enumerators(&mut self, body: &[String]) {
        let mut next = Some(0_u64);
        let mut tokens = Tokens { all: body, at: 0 };
        while !tokens.done() {
            let name = tokens.next();
            if tokens.take("=") {
                let start = tokens.at;
                let mut depth = 0;
                while !tokens.done() && (depth > 0 || tokens.peek(0) != ",") {
                    match tokens.next() {
                        "(" => depth += 1,
                        ")" => depth -= 1,
                        _ => {}
                    }
                }
                next = self.value(&body[start..tokens.at]);
            }
            tokens.take(",");
            if let Some(value) = next {
                self.constants.insert(name.to_owned(), value);
            }
            next = next.map(|value| value.wrapping_add(1));
        }
    }

    /// Evaluates a constant expression. Returns `None` if it contains an unknown name or operator.
    fn value(&self, tokens: &[String]) -> Option<u64> {
        let mut tokens = Tokens { all: tokens, at: 0 };
        let value = self.expression(&mut tokens, 0)?;
        tokens.done().then_some(value)
    }

    fn expression(&self, tokens: &mut Tokens<'_>, level: usize) -> Option<u64> {
        const LEVELS: [&[&str]; 5] = [&["|"], &["&"], &["<<", ">>"], &["+", "-"], &["*", "/"]];
        let Some(operators) = LEVELS.get(level) else {
            return self.operand(tokens);
        };
        let mut left = self.expression(tokens, level + 1)?;
        while operators.contains(&tokens.peek(0)) {
            let operator = tokens.next();
            let right = self.expression(tokens, level + 1)?;
            left = match operator {
                "|" => left | right,
                "&" => left & right,
                "<<" => left.checked_shl(u32::try_from(right).ok()?)?,
                ">>" => left.checked_shr(u32::try_from(right).ok()?)?,
                "+" => left.checked_add(right)?,
                "-" => left.checked_sub(right)?,
                "*" => left.checked_mul(right)?,
                _ => left.checked_div(right)?,
            };
        }
        Some(left)
    }

    fn operand(&self, tokens: &mut Tokens<'_>) -> Option<u64> {
        let token = tokens.next();
        if token == "(" {
            if ["u64", "u32", "u8"].contains(&tokens.peek(0)) && tokens.peek(1) == ")" {
                tokens.next();
                tokens.next();
                return self.operand(tokens);
            }
            let value = self.expression(tokens, 0)?;
            return tokens.take(")").then_some(value);
        }
        if tokens.peek(0) == "(" {
            tokens.next();
            let arguments = tokens.balanced();
            let mut values = arguments
                .split(|token| token == ",")
                .map(|argument| self.value(argument));
            let first = values.next()??;
            return match token {
                "BIT" | "BIT_ULL" => 1_u64.checked_shl(u32::try_from(first).ok()?),
                "GENMASK" => {
                    let low = u32::try_from(values.next()??).ok()?;
                    let high = u32::try_from(first).ok().filter(|high| *high < 63)?;
                    Some((1_u64 << (high + 1)).checked_sub(1_u64.checked_shl(low)?)?)
                }
                _ => None,
            };
        }
        if token.starts_with(|c: char| c.is_ascii_digit()) {
            let digits = token.trim_end_matches(['u', 'U', 'l', 'L']);
            return match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
                Some(hex) => u64::from_str_radix(hex, 16).ok(),
                None => digits.parse().ok(),
            };
        }
        self.constants.get(token).copied()
    }

    fn aggregate(&self, body: &[String], union: bool, unit: Unit, packed: bool) -> Result<Layout> {
        let mut layout = Layout {
            align: 1,
            ..Layout::default()
        };
        let mut end = 0_u64;
        let mut tokens = Tokens { all: body, at: 0 };
        while !tokens.done() {
            let flexible = tokens.take("DECLARE_FLEX_ARRAY");
            if tokens.peek(0) == "struct_group" {
                // struct_group: its members are members of the structure too.
                tokens.next();
                tokens.expect("(")?;
                let inner = tokens.balanced();
                let rest = inner
                    .iter()
                    .position(|token| token == ",")
                    .map_or(inner, |at| &inner[at + 1..]);
                let group = self.aggregate(rest, false, unit, packed)?;
                end = layout.place(end, union, packed, &group.members, group.bits, group.align);
                tokens.take(";");
                continue;
            }
            if flexible {
                tokens.expect("(")?;
            }
            let element = self.element(&mut tokens, unit)?;
            if flexible {
                tokens.expect(",")?;
            }
            // Declarators, separated by commas: `name`, `name[3]`, `name[3][8]`, `name:1`, or empty.
            loop {
                let name = if tokens.peek(0).starts_with(|c: char| c.is_alphabetic() || c == '_')
                    && tokens.peek(0) != "__packed"
                {
                    tokens.next().to_owned()
                } else {
                    String::new()
                };
                let mut extents = Vec::new();
                if flexible {
                    tokens.expect(")")?;
                    extents.push(0);
                }
                while tokens.take("[") {
                    let inside = tokens.balanced();
                    extents.push(if inside.is_empty() {
                        0
                    } else {
                        match self.value(inside) {
                            Some(extent) => extent,
                            None => return fail(format!("length of {name:?}")),
                        }
                    });
                }
                if unit == Unit::Bytes && tokens.take(":") {
                    // The compiler's target determines the position of a bit, so the parser only reserves space for it.
                    let Some(bits) = self.value(&[tokens.next().to_owned()]) else {
                        return fail(format!("width of {name:?}"));
                    };
                    end = layout.place(end, union, packed, &[], bits, 1);
                } else {
                    let (members, bits) = element.declare(&name, extents, unit)?;
                    end = layout.place(end, union, packed, &members, bits, element.align);
                }
                if !tokens.take(",") {
                    break;
                }
            }
            tokens.take("__packed");
            tokens.expect(";")?;
        }
        if unit == Unit::Bytes && !packed {
            end = end.next_multiple_of(layout.align);
        }
        layout.bits = end;
        Ok(layout)
    }

    /// Parses the type before a declarator.
    fn element(&self, tokens: &mut Tokens<'_>, unit: Unit) -> Result<Element> {
        let word = tokens.next();
        if word == "struct" || word == "union" {
            let name = if tokens.peek(0) == "{" { "" } else { tokens.next() };
            if tokens.take("{") {
                let body = tokens.balanced();
                let packed = tokens.take("__packed");
                let layout = self.aggregate(body, word == "union", unit, packed)?;
                return Ok(Element {
                    bits: layout.bits,
                    align: layout.align,
                    inline: Some(layout.members),
                    aggregate: true,
                });
            }
            return match self.types.get(name) {
                Some(layout) => Ok(Element {
                    bits: layout.bits,
                    align: layout.align,
                    inline: None,
                    aggregate: true,
                }),
                None => fail(format!("unknown {word} {name}")),
            };
        }
        let bits = match (unit, word) {
            (Unit::Bits, "u8") => 1,
            (Unit::Bytes, "u8" | "char" | "__u8") => 8,
            (Unit::Bytes, "u16" | "__be16") => 16,
            (Unit::Bytes, "u32" | "__be32") => 32,
            (Unit::Bytes, "u64" | "__be64") => 64,
            _ => return fail(format!("unknown type {word:?}")),
        };
        Ok(Element {
            bits,
            align: bits,
            inline: None,
            aggregate: false,
        })
    }
}

struct Element {
    bits: u64,
    align: u64,
    /// Members of a structure that is defined in place.
    inline: Option<Vec<Member>>,
    aggregate: bool,
}

impl Element {
    /// Returns the members of a declarator of this type, and their size in bits.
    fn declare(&self, name: &str, mut extents: Vec<u64>, unit: Unit) -> Result<(Vec<Member>, u64)> {
        let mut width = self.bits;
        if unit == Unit::Bits && !self.aggregate {
            // The last extent is the width of the field; those before it are the array dimensions.
            match extents.pop() {
                Some(0) => extents.push(0),
                Some(last) => width = last,
                None => return fail(format!("field {name:?} without a width")),
            }
        }
        let count = (!extents.is_empty()).then(|| extents.iter().product());
        let bits = width * count.unwrap_or(1);
        if let Some(inline) = &self.inline {
            if count.is_some() {
                return fail(format!("array {name:?} of a structure without a name"));
            }
            let members = inline.iter().map(|member| Member {
                name: if name.is_empty() {
                    member.name.clone()
                } else {
                    format!("{name}_{}", member.name)
                },
                ..member.clone()
            });
            return Ok((members.collect(), bits));
        }
        let member = Member {
            name: name.to_owned(),
            offset: 0,
            width,
            count,
            aggregate: self.aggregate,
        };
        Ok((vec![member], bits))
    }
}

impl Layout {
    /// Adds members at the next position. Returns the new end of the structure.
    fn place(&mut self, end: u64, union: bool, packed: bool, members: &[Member], bits: u64, align: u64) -> u64 {
        let mut start = if union { 0 } else { end };
        if !packed {
            start = start.next_multiple_of(align.max(1));
            self.align = self.align.max(align);
        }
        self.members.extend(members.iter().map(|member| Member {
            offset: start + member.offset,
            ..member.clone()
        }));
        end.max(start + bits)
    }
}
