// Yamlcheck tells what the YAML library of Kubernetes, Helm and Flux makes of a document.
// The differential tests compare our own reading and writing of YAML with its answers.
//
// Usage:
//
//	yamlcheck          reads frames: a line with a decimal number of bytes, then that many bytes of one document
//	yamlcheck stream   reads documents that lines of "---" separate, as "kubectl kustomize" prints them
//
// Each frame or document gives one line: the value as compact JSON, its keys sorted and its numbers as
// the library prints them, or "!" and {"error":"..."} when the library refuses it. A line is flushed
// before the next frame is read, so a test can keep one process and ask it question after question.
//
// A frame that holds several documents counts as its first, as it does for the library. A document of
// comments alone is null.
//
// The exit status is 0 at the end of the input, 1 when the input itself cannot be read (a bad length, a
// short frame) or, with "stream", when a document was refused, and 2 for wrong arguments.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

func main() {
	var run func(*bufio.Reader, *bufio.Writer) error
	switch args := os.Args[1:]; {
	case len(args) == 0:
		run = frames
	case len(args) == 1 && args[0] == "stream":
		run = stream
	default:
		fmt.Fprintln(os.Stderr, "usage: yamlcheck [stream]")
		os.Exit(2)
	}
	if err := run(bufio.NewReader(os.Stdin), bufio.NewWriter(os.Stdout)); err != nil {
		fmt.Fprintln(os.Stderr, "yamlcheck:", err)
		os.Exit(1)
	}
}

// frames answers each frame before it reads the next.
func frames(in *bufio.Reader, out *bufio.Writer) error {
	var document bytes.Buffer
	for number := 1; ; number++ {
		header, err := in.ReadString('\n')
		if err == io.EOF && header == "" {
			return nil
		}
		if err != nil {
			return fmt.Errorf("frame %d: reading its length: %w", number, noEOF(err))
		}
		length, err := strconv.ParseUint(strings.TrimSuffix(header, "\n"), 10, 31)
		if err != nil {
			return fmt.Errorf("frame %d: its length: %w", number, err)
		}
		document.Reset()
		if _, err := io.CopyN(&document, in, int64(length)); err != nil {
			return fmt.Errorf("frame %d: reading its %d bytes: %w", number, length, noEOF(err))
		}
		line, err := convert(document.Bytes())
		if err := answer(out, line, err); err != nil {
			return err
		}
	}
}

// stream answers each document of a stream, the refused ones too, and then tells whether any was refused.
func stream(in *bufio.Reader, out *bufio.Writer) error {
	refused := 0
	documents := utilyaml.NewYAMLReader(in)
	for {
		document, err := documents.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			return errors.Join(err, answer(out, nil, err))
		}
		line, err := convert(document)
		if err != nil {
			refused++
		}
		if err := answer(out, line, err); err != nil {
			return err
		}
	}
	if refused > 0 {
		return fmt.Errorf("%d refused documents", refused)
	}
	return nil
}

// convert gives the line for one document. A panic of the library is an answer like any other: a
// test that finds one wants to know the document.
func convert(document []byte) (line []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			line, err = nil, fmt.Errorf("panic: %v", r)
		}
	}()
	converted, err := yaml.YAMLToJSON(document)
	if err != nil {
		return nil, err
	}
	var value any
	decoder := json.NewDecoder(bytes.NewReader(converted))
	decoder.UseNumber()
	if err := decoder.Decode(&value); err != nil {
		return nil, err
	}
	return compact(value)
}

// answer writes and flushes one line.
func answer(out *bufio.Writer, line []byte, refusal error) error {
	if refusal != nil {
		text, err := compact(map[string]string{"error": refusal.Error()})
		if err != nil {
			return err
		}
		line = append([]byte{'!'}, text...)
	}
	if _, err := out.Write(line); err != nil {
		return err
	}
	return out.Flush()
}

// compact gives value as one line of JSON, which ends with a newline. HTML is left as it is.
func compact(value any) ([]byte, error) {
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return nil, err
	}
	return line.Bytes(), nil
}

// noEOF makes an end inside a frame an error that says so.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
